// What begins and ends each call into the engine: see `offload/interrupt.py`, `offload/aside.py`.
//
// Over the handler that Python has laid lies one of our own. It hands on what comes; but while
// something whole is under way it only notes it, and `deliver` hands it on. So what Python shows as
// its handlers is what the user has set, and nothing has to be exchanged from call to call.
#include <nanobind/nanobind.h>
#include <pthread.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <optional>
#include <vector>

namespace nb = nanobind;

namespace {

struct Signal {
    int number;
    nb::handle name;  // the same, as an int of Python's
};

std::atomic<bool> inside{false};
int depth = 0;  // how many are one in another, while `inside`
std::atomic<int> presses{0}, torn{0}, last{0};
std::array<std::atomic<int>, NSIG> came{};   // as which of all that came; 0 where it did not
std::array<struct sigaction, NSIG> below{};  // what ours lies over
pthread_t main_thread;
std::vector<Signal> signals;

nb::handle getsignal;
PyCFunction direct = nullptr;  // what that is made of, if it takes one object: signals are many

void hand_on(int number, siginfo_t* info, void* context) {
    const struct sigaction& other = below[size_t(number)];
    if (other.sa_flags & SA_SIGINFO) {
        other.sa_sigaction(number, info, context);
    } else {
        other.sa_handler(number);
    }
}

// On any thread. Of this and `deliver`, where they meet, one finds what came: both write, then look.
void note(int number, siginfo_t* info, void* context) {
    if (inside && number == SIGINT && ++presses == 2) {
        torn++;
        inside = false;
    }
    int never = 0;
    came[size_t(number)].compare_exchange_strong(never, ++last);
    if (!inside && came[size_t(number)].exchange(0) != 0) hand_on(number, info, context);
}

// Lie over every handler that is a function of Python's; who has set one since has taken ours off.
void lay() {
    PyObject* self = direct != nullptr ? PyCFunction_GetSelf(getsignal.ptr()) : nullptr;
    for (const Signal& one : signals) {
        const nb::object handler =
            direct != nullptr ? nb::steal(direct(self, one.name.ptr())) : getsignal(one.name);
        if (!handler.is_valid()) throw nb::python_error();
        if (handler.is_none() || PyLong_Check(handler.ptr())) continue;
        struct sigaction now;
        if (sigaction(one.number, nullptr, &now) != 0) continue;
        if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == note) continue;
        if (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN) continue;
        below[size_t(one.number)] = now;
        now.sa_flags |= SA_SIGINFO;
        now.sa_sigaction = note;
        sigaction(one.number, &now, nullptr);
    }
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

constexpr int BEGUN = 1, UNUSUAL = 2;
std::optional<Quiet> usual;

// What came first, and is taken away; 0 where nothing did.
int next() {
    int first = 0, least = 0;
    for (const Signal& one : signals) {
        const int at = came[size_t(one.number)];
        if (at != 0 && (least == 0 || at < least)) first = one.number, least = at;
    }
    return first != 0 && came[size_t(first)].exchange(0) != 0 ? first : 0;
}

// Calls the handlers of what came; the last error is raised, with the one before as its context.
void deliver(std::optional<nb::python_error> raised) {
    inside = false;
    if (last != 0) {
        last = 0;
        while (const int number = next()) {
            if (below[size_t(number)].sa_flags & SA_SIGINFO) {
                raise(number);  // It may want to know where it came.
            } else {
                below[size_t(number)].sa_handler(number);  // Also where this thread has it blocked.
            }
            if (PyErr_CheckSignals() == 0) continue;
            nb::python_error error;
            if (raised) PyException_SetContext(error.value().ptr(), raised->value().inc_ref().ptr());
            raised.emplace(std::move(error));
        }
    }
    if (raised) throw nb::python_error(*raised);
}

// [Note: No gap]
// Python calls handlers at the ends of calls, but not between `__enter__` of a `with` and its body,
// if that is no function of Python's, nor between the body and `__exit__`. What came before signals
// wait is called in `enter`, as Python would call it in the midst of the body else.
int enter() {
    const int how = (*usual)() ? 0 : UNUSUAL;
    if (!on_main_thread()) return how | BEGUN;
    if (inside) {
        depth++;
        return how;
    }
    try {
        lay();
        presses = 0;
        depth = 1;
        inside = true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    } catch (nb::python_error& error) {
        deliver(std::move(error));
    }
    return how | BEGUN;
}

void leave() {
    if (!on_main_thread() || (inside && --depth > 0)) return;
    deliver({});
}

struct UnderWay {};

}  // namespace

NB_MODULE(_whole, module) {
    module.def("prepare", [](uintptr_t thread, nb::handle get, nb::list numbers, nb::args quiet) {
        main_thread = pthread_t(thread);
        getsignal = get.inc_ref();  // for as long as the process lives
        if (PyCFunction_Check(get.ptr()) && PyCFunction_GetFlags(get.ptr()) == METH_O) {
            direct = PyCFunction_GetFunction(get.ptr());
        }
        usual.emplace(quiet);
        for (nb::handle number : numbers) {
            signals.push_back({nb::cast<int>(number), number.inc_ref()});
        }
    });
    module.attr("BEGUN") = BEGUN;
    module.attr("UNUSUAL") = UNUSUAL;
    nb::class_<UnderWay>(module, "UnderWay")
        .def(nb::init<>())
        .def("__enter__", [](UnderWay&) { return enter(); })
        .def("__exit__",
             [](UnderWay&, nb::handle, nb::handle, nb::handle) { leave(); },
             nb::arg().none(), nb::arg().none(), nb::arg().none());
    module.def("inside", [] { return inside.load(); });
    module.def("torn", [] { return torn.load(); });
    module.def("quiet", [](nb::args questions) { return nb::cpp_function(Quiet(questions)); });
    pthread_atfork(nullptr, nullptr, [] {
        if (!on_main_thread()) inside = false;  // What was under way there is not, in the child.
    });
}
