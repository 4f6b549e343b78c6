// What Python sees of the engine: buffers in, requests out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "engine.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace aio;
using without_gil::must_not_ask;
using without_gil::Passing;
using without_gil::WithoutGil;

constexpr int64_t SLICE_NS = 100'000'000;  // after so long Ctrl-C is looked for

// [Note: Buffers under way]
// What a transfer holds of Python is given back by whoever next looks at a transfer that is done,
// with the GIL: the engine's thread, which has none, only puts it on a list. The end of memory may
// let the GIL go or run anything, so they are taken off the list one by one, and a transfer is
// `done` only once its buffers are free. The list takes no lock, as a forked child may inherit it;
// only who has the GIL takes off it.
struct GivenBack {
    Signal done;
    std::atomic<pthread_t> by{};  // the thread that is at it
};

struct Held {
    nb::object file;
    std::vector<Py_buffer> buffers;
    std::shared_ptr<GivenBack> given_back = std::make_shared<GivenBack>();
    bool writing = false;
    int64_t moved = 0, operations = 0;
    Held* next = nullptr;
};

static std::atomic<Held*> over{nullptr};

static void add(nb::handle file, const char* name, int64_t value) {
    file.attr(name) = nb::cast<int64_t>(file.attr(name)) + value;
}

static Held* taken_off_list() {
    Held* first = over.load();
    while (first != nullptr && !over.compare_exchange_weak(first, first->next)) {}
    return first;
}

static void settle() {
    if (must_not_ask()) return;  // the system takes it all back
    const Passing to_free_memory;
    while (Held* held = taken_off_list()) {
        const std::shared_ptr<GivenBack> given_back = held->given_back;
        given_back->by = pthread_self();
        for (Py_buffer& buffer : held->buffers) PyBuffer_Release(&buffer);
        add(held->file, held->writing ? "bytes_written" : "bytes_read", held->moved);
        add(held->file, "operations", held->operations);
        add(held->file, "pending", -1);
        delete held;
        given_back->done.set();
    }
}

static void put_on_list(Held* held) {
    held->next = over.load();
    while (!over.compare_exchange_weak(held->next, held)) {}
}

// Wait by slices, without the GIL, until `wait(nanoseconds)` says yes or the time is up.
template <class Wait> static bool wait_interruptibly(std::optional<double> seconds, Wait wait) {
    if (seconds && std::isnan(*seconds)) throw nb::value_error("a timeout that is no number");
    double left = seconds.value_or(0) * 1e9;
    while (true) {
        const int64_t slice =
            seconds ? int64_t(std::clamp(left, 0.0, double(SLICE_NS))) : SLICE_NS;
        bool yes;
        {
            const WithoutGil released;
            timespec before, after;
            clock_gettime(CLOCK_MONOTONIC, &before);
            yes = wait(slice);
            clock_gettime(CLOCK_MONOTONIC, &after);
            left -= double(after.tv_sec - before.tv_sec) * 1e9 +
                    double(after.tv_nsec - before.tv_nsec);
        }
        if (yes) return true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (seconds && left <= 0) return false;
    }
}

// A signal as Python holds it. The engine's copy of the pointer knows nothing of Python, so that
// whoever lets it go needs no GIL.
struct PythonSignal {
    std::shared_ptr<Signal> inner = std::make_shared<Signal>();
};

static bool wait_for(Signal& signal, std::optional<double> seconds) {
    return signal.is_set() || wait_interruptibly(seconds, [&](int64_t ns) {
        return signal.wait_once(ns);  // for what Python does about signals
    });
}

// An engine as Python holds it. To drop one never waits, as that would be with the GIL: where
// closing it was interrupted, its thread is left to finish by itself.
class Owned {
public:
    explicit Owned(const Options& options) : engine_(std::make_unique<Engine>(options)) {}
    Owned(const Owned&) = delete;
    ~Owned() {
        if (getpid() == pid_ && !engine_->close(0)) static_cast<void>(engine_.release());
    }
    Engine* operator->() const { return engine_.get(); }

private:
    std::unique_ptr<Engine> engine_;
    const pid_t pid_ = getpid();
};

// A request as Python holds it.
struct PythonRequest {
    std::shared_ptr<Request> inner;
    std::shared_ptr<GivenBack> given_back;

    bool done() const {
        if (!inner->done().is_set()) return false;
        settle();
        return given_back->done.is_set();
    }

    bool wait(std::optional<double> seconds) const {
        if (!wait_for(inner->done(), seconds)) return false;
        settle();
        if (given_back->done.is_set()) return true;
        if (pthread_equal(given_back->by, pthread_self())) return false;  // in the midst of it
        return wait_for(given_back->done, seconds);  // another thread is at it
    }
};

static std::optional<PythonRequest> submit(Owned& engine, nb::object file, bool writing,
                                       int64_t align, nb::tuple parts) {
    settle();
    if (nb::cast<bool>(file.attr("closed"))) return std::nullopt;
    auto held = std::make_unique<Held>();
    Transfer transfer{.fd = nb::cast<int>(file.attr("fd")), .writing = writing, .align = align};
    held->file = file;
    held->writing = writing;
    held->buffers.resize(nb::len(parts));
    for (size_t i = 0; i < held->buffers.size(); i++) {
        const auto part = nb::cast<nb::tuple>(parts[i]);
        const auto offset = nb::cast<int64_t>(part[1]);
        Py_buffer& buffer = held->buffers[i];
        if (PyObject_GetBuffer(nb::object(part[0]).ptr(), &buffer,
                               writing ? PyBUF_SIMPLE : PyBUF_WRITABLE) != 0) {
            for (size_t k = 0; k < i; k++) PyBuffer_Release(&held->buffers[k]);
            throw nb::python_error();
        }
        transfer.parts.push_back({static_cast<std::byte*>(buffer.buf), buffer.len, offset});
    }
    Held* const kept = held.get();
    PythonRequest request{nullptr, kept->given_back};
    transfer.finished = [kept](int64_t moved, int64_t operations) {
        kept->moved = moved;
        kept->operations = operations;
        put_on_list(kept);
    };
    add(file, "pending", 1);
    held.release();
    request.inner = engine->submit(std::move(transfer));
    if (request.inner != nullptr) return request;
    put_on_list(kept);  // closed
    settle();
    return std::nullopt;
}

// None, or what is needed to say what failed.
static nb::object failure(PythonRequest& request) {
    const Failure& found = request.inner->failure();
    if (found.code == 0) return nb::none();
    return nb::make_tuple(found.code, int(found.cause), found.offset, found.bytes, found.tries,
                          found.last_code, found.free_bytes);
}

static nb::tuple counters(Owned& engine) {
    const Counters found = engine->counters();
    nb::list latencies;
    for (int64_t count : found.latencies) latencies.append(count);
    return nb::make_tuple(found.bytes_read, found.bytes_written, found.operations, found.retries,
                          found.depth_max, nb::tuple(latencies), double(found.cpu_ns) * 1e-9);
}

static uintptr_t address_of(nb::handle memory) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(memory.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const auto found = reinterpret_cast<uintptr_t>(buffer.buf);
    PyBuffer_Release(&buffer);
    return found;
}

static std::byte* at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

// What the system refused, as an OSError of its errno.
static void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
        const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

static void bind_engine(nb::module_& m) {
    nb::class_<Owned>(m, "Engine")
        .def("__init__",
             [](Owned* self, int kind, int depth, int64_t piece_bytes, int64_t inflight_bytes_max,
                const std::map<int64_t, int>& errors, uint64_t seed, double short_rate,
                double retry_rate, double refusal_rate, int64_t broken_at) {
                 const Options options{Kind(kind), depth, piece_bytes, inflight_bytes_max,
                                       {errors, seed, short_rate, retry_rate, refusal_rate,
                                        broken_at}};
                 const WithoutGil released;
                 new (self) Owned(options);
             },
             nb::arg("kind"), nb::arg("depth"), nb::arg("piece_bytes"),
             nb::arg("inflight_bytes_max"), nb::arg("errors"), nb::arg("seed"),
             nb::arg("short_rate"), nb::arg("retry_rate"), nb::arg("refusal_rate"),
             nb::arg("broken_at"))
        .def("submit", &submit, nb::arg("file"), nb::arg("writing"), nb::arg("align"),
             nb::arg("parts"))
        .def("drain",
             [](Owned& engine, int fd) {
                 const auto drained = [&](int64_t ns) { return engine->drain(fd, ns); };
                 wait_interruptibly(std::nullopt, drained);
                 settle();
             })
        .def("forget",
             [](Owned& engine, int fd) {
                 const WithoutGil released;
                 engine->forget(fd);
             })
        .def("register_buffer",
             [](Owned& engine, uintptr_t address, int64_t bytes) {
                 const WithoutGil released;
                 return engine->register_buffer(at(address), bytes);
             })
        .def("unregister_buffer",
             [](Owned& engine, uintptr_t address, int64_t bytes) {
                 const WithoutGil released;
                 engine->unregister_buffer(at(address), bytes);
             })
        .def("counters", &counters)
        .def("close", [](Owned& engine) {
            wait_interruptibly(std::nullopt, [&](int64_t ns) { return engine->close(ns); });
            settle();
        });
}

NB_MODULE(_native, m) {
    m.attr("VERSION") = 1;  // see aio/built.py
    nb::set_leak_warnings(false);  // a transfer under way at exit holds its file and buffers
    nb::register_exception_translator(translate);
    nb::class_<PythonSignal>(m, "Signal")
        .def(nb::init<>())
        .def("set", [](PythonSignal& signal) { signal.inner->set(); })
        .def("wait",
             [](PythonSignal& signal, std::optional<double> seconds) {
                 return wait_for(*signal.inner, seconds);
             },
             nb::arg("timeout") = nb::none());
    nb::class_<PythonRequest>(m, "Request")
        .def("done", &PythonRequest::done)
        .def("wait", &PythonRequest::wait, nb::arg("timeout") = nb::none())
        .def("failure", &failure)
        .def("watch",
             [](PythonRequest& request, PythonSignal& signal) {
                 request.inner->watch(signal.inner);
             })
        .def("unwatch", [](PythonRequest& request, PythonSignal& signal) {
            request.inner->unwatch(signal.inner);
        });
    bind_engine(m);
    m.def("address_of", &address_of, nb::arg("memory"));
    m.attr("KINDS") = nb::make_tuple("io_uring", "linux_aio", "threads");
    without_gil::prepare_for_the_end();
}
