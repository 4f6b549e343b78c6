// What begins and ends each call into the engine: see `offload/interrupt.py`, `offload/aside.py`.
//
// Over the handler that Python has with the kernel lies one of our own. It hands on what comes; but
// while something whole is under way it only notes it, and `deliver` hands it on. So what Python
// shows as its handlers is what the user has set, and nothing is exchanged from call to call.
#include <nanobind/nanobind.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <array>
#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

namespace nb = nanobind;

namespace {

struct Signal {
    int number;
    nb::handle name;  // the same, as an int of Python's
};

using Handler = void (*)(int);

Handler python = nullptr;  // the one of Python, for all signals that a function of Python's handles
pthread_t main_thread;
std::vector<Signal> signals;
nb::handle getsignal;
PyCFunction direct = nullptr;  // what that is made of, if it takes one object: signals are many

std::atomic<bool> inside{false};
int depth = 0;  // how many are one in another, while `inside`
std::atomic<int> presses{0}, torn{0};
std::atomic<bool> any{false};               // whether anything came, told after it was noted
std::atomic<long> last{0}, handed{0};       // how many came, and how many of them went on
std::atomic<int> handing{0};                // threads that are about to hand on, or not to
std::array<std::atomic<long>, NSIG> came{};  // as which of all that came; 0 where it did not

// On any thread. Of this and `deliver`, where they meet, one finds what came: both write, then
// look. Of this and `enter`, which waits for it, likewise.
void note(int number) {
    if (inside && number == SIGINT && ++presses == 2) {
        torn++;
        inside = false;
    }
    long never = 0;
    came[size_t(number)].compare_exchange_strong(never, ++last);
    any = true;
    handing++;
    if (!inside && came[size_t(number)].exchange(0) != 0) {
        handed++;
        python(number);
    }
    handing--;
}

// Lie over every handler that is Python's own, and over nobody else's, who may call what was there
// before; whether there was any. Who has set one since has taken ours off.
bool lay() {
    bool found = false;
    PyObject* self = direct != nullptr ? PyCFunction_GetSelf(getsignal.ptr()) : nullptr;
    for (const Signal& one : signals) {
        const nb::object handler =
            direct != nullptr ? nb::steal(direct(self, one.name.ptr())) : getsignal(one.name);
        if (!handler.is_valid()) throw nb::python_error();
        if (handler.is_none() || PyLong_Check(handler.ptr())) continue;
        struct sigaction now;
        if (sigaction(one.number, nullptr, &now) != 0) continue;
        if ((now.sa_flags & SA_SIGINFO) || now.sa_handler != python) continue;
        now.sa_handler = note;
        sigaction(one.number, &now, nullptr);
        found = true;
    }
    return found;
}

bool on_main_thread() { return pthread_equal(pthread_self(), main_thread); }

// Asks without a frame of Python's in between.
struct Quiet {
    std::vector<nb::handle> questions;  // never let go

    explicit Quiet(const nb::args& all) {
        for (nb::handle question : all) questions.push_back(question.inc_ref());
    }
    bool operator()() const {
        for (const nb::handle question : questions) {
            const nb::object answer = question();
            const int so = PyObject_IsTrue(answer.ptr());
            if (so < 0) throw nb::python_error();
            if (so) return false;
        }
        return true;
    }
};

constexpr int BEGUN = 1, NESTED = 2, UNUSUAL = 4;
std::optional<Quiet> usual;

// What came first, and is taken away; 0 where nothing did.
int next() {
    long least = 0;
    int first = 0;
    for (const Signal& one : signals) {
        const long at = came[size_t(one.number)];
        if (at != 0 && (least == 0 || at < least)) first = one.number, least = at;
    }
    return first != 0 && came[size_t(first)].exchange(0) != 0 ? first : 0;
}

bool leads_to(PyObject* error, PyObject* other) {
    nb::object at = nb::borrow(error);
    for (; at.is_valid(); at = nb::steal(PyException_GetContext(at.ptr())))
        if (at.ptr() == other) return true;
    return false;
}

// Let `before` be what was raised before `error`, and before all that led to it.
void hang(PyObject* error, PyObject* before) {
    if (leads_to(error, before) || leads_to(before, error)) return;
    nb::object at = nb::borrow(error), context;
    while ((context = nb::steal(PyException_GetContext(at.ptr()))).is_valid()) at = context;
    PyException_SetContext(at.ptr(), nb::borrow(before).release().ptr());
}

// Calls the handlers of what came; the last error is raised.
void deliver() {
    inside = false;
    std::optional<nb::python_error> raised;
    while (any.exchange(false)) {
        while (const int number = next()) {
            python(number);  // Also where this thread has it blocked.
            if (PyErr_CheckSignals() == 0) continue;
            nb::python_error error;
            if (raised) hang(error.value().ptr(), raised->value().ptr());
            raised.emplace(std::move(error));
        }
    }
    if (raised) throw nb::python_error(*raised);
}

// What Python has been told of and not yet called is called first: at the end of this call it would
// be in the midst of what is whole. So nothing may have gone on between that and `inside`.
int enter() {
    const int how = (*usual)() ? 0 : UNUSUAL;
    if (!on_main_thread()) return how;
    if (inside) {
        depth++;
        return how | NESTED;
    }
    for (bool quiet = false; !quiet;) {
        inside = false;
        const long before = handed;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        quiet = !lay();
        presses = 0;
        depth = 1;
        inside = true;
        while (handing != 0) sched_yield();
        quiet = quiet && handed == before;
    }
    return how | BEGUN;
}

void leave() {
    if (on_main_thread() && !(inside && --depth > 0)) deliver();
}

// What Python has of it, and may change: see `offload/interrupt.py`.
struct Told {
    nb::handle names;  // of the module: `owner` is among them
    nb::handle owner, tear;
};
Told told;

// The last calls, in a ring, once they are recorded: no objects of Python's, which its garbage
// collector would count.
struct Call {
    double began, ended;
    nb::handle owner;  // held
};
std::vector<Call> calls;
size_t calls_max = 0, oldest = 0;

double now() {  // as Python's time.perf_counter
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
}

void record(double since) {
    if (since == 0) return;
    const nb::handle found = PyDict_GetItemWithError(told.names.ptr(), told.owner.ptr());
    Call one{since, now(), (found.is_valid() ? found : nb::handle(Py_None)).inc_ref()};
    if (calls.size() < calls_max) {
        calls.push_back(one);
        return;
    }
    std::swap(calls[oldest], one);
    oldest = (oldest + 1) % calls_max;
    one.owner.dec_ref();  // Last, as that may call anything.
}

// Between `enter` and `leave` Python calls no handler: what is called lies in between as a whole.
nb::object run(PyObject* const* args, size_t count, PyObject* names) {
    const double since = calls_max ? now() : 0;
    const int how = enter();
    PyObject* work = args[how & UNUSUAL ? 1 : 0];
    nb::object result = nb::steal(PyObject_Vectorcall(work, args + 2, count - 2, names));
    std::optional<nb::python_error> raised;
    try {
        if (!result.is_valid()) {
            raised.emplace();
            if ((how & BEGUN) && presses < 2) told.tear(raised->value());
        }
        if (!(how & NESTED)) record(since);
    } catch (nb::python_error& error) {
        raised.emplace(std::move(error));
    }
    try {
        leave();
    } catch (nb::python_error& error) {
        if (raised) hang(error.value().ptr(), raised->value().ptr());
        throw;
    }
    if (raised) throw nb::python_error(*raised);
    return result;
}

PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    try {
        return run(args, size_t(count), names).release().ptr();
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyMethodDef calling = {"call", PyCFunction(reinterpret_cast<void*>(&call)),
                       METH_FASTCALL | METH_KEYWORDS, nullptr};

}  // namespace

NB_MODULE(_whole, module) {
    module.attr("VERSION") = 4;  // as offload/aside.py has it
    module.def("handler_of", [](int number) {
        struct sigaction now;
        return sigaction(number, nullptr, &now) == 0 ? uintptr_t(now.sa_handler) : 0;
    });
    module.def("prepare", [](uintptr_t thread, uintptr_t handler, nb::handle get,
                             nb::list numbers, nb::args quiet) {
        main_thread = pthread_t(thread);
        python = Handler(handler);
        getsignal = get.inc_ref();  // for as long as the process lives
        if (PyCFunction_Check(get.ptr()) && PyCFunction_GetFlags(get.ptr()) == METH_O) {
            direct = PyCFunction_GetFunction(get.ptr());
        }
        usual.emplace(quiet);
        for (nb::handle number : numbers) {
            signals.push_back({nb::cast<int>(number), number.inc_ref()});
        }
    });
    module.def("tell", [](nb::dict names, nb::handle tear) {
        told.names = names.inc_ref();
        told.owner = nb::steal(PyUnicode_InternFromString("owner")).release();
        told.tear = tear.inc_ref();
    });
    module.def("record", [](size_t most) {
        if (calls_max) return;
        calls_max = most;
        calls.reserve(most);
    });
    module.def("recorded", [] {
        std::vector<std::tuple<double, double, nb::object>> found;  // first: a list may collect
        for (size_t at = 0; at < calls.size(); at++) {
            const Call& one = calls[(oldest + at) % calls.size()];
            found.emplace_back(one.began, one.ended, nb::borrow(one.owner));
        }
        nb::list made;
        for (const auto& [began, ended, owner] : found) {
            made.append(nb::make_tuple(began, ended, owner));
        }
        return made;
    });
    module.attr("call") = nb::steal(PyCFunction_NewEx(&calling, nullptr, nullptr));
    module.def("inside", [] { return inside.load(); });
    module.def("torn", [] { return torn.load(); });
    module.def("quiet", [](nb::args questions) { return nb::cpp_function(Quiet(questions)); });
    pthread_atfork(nullptr, nullptr, [] {  // The child has one thread, and none of what came.
        if (!on_main_thread()) inside = false;
        main_thread = pthread_self();
        torn++;  // What was whole is its parent's. Not all who fork tell Python of it.
        handing = 0;
        any = false;
        for (auto& one : came) one = 0;
    });
}
