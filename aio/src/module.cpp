// What Python sees of the engine: buffers in, requests out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <atomic>
#include <optional>
#include <system_error>
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
// with the GIL: the engine's thread, which has none, only puts it on a list, before the transfer is
// done. The end of memory may let the GIL go or run anything, so they are taken off the list one by
// one. The list takes no lock, as a forked child may inherit it; only who has the GIL takes off it.
struct Held {
    nb::object file;
    std::vector<Py_buffer> buffers;
    Held* next = nullptr;

    ~Held() {
        for (Py_buffer& buffer : buffers) PyBuffer_Release(&buffer);
    }
};

static std::atomic<Held*> over{nullptr};

static Held* taken_off_list() {
    Held* first = over.load();
    while (first != nullptr && !over.compare_exchange_weak(first, first->next)) {}
    return first;
}

static void settle() {
    if (must_not_ask()) return;  // the system takes it all back
    const Passing to_free_memory;
    while (Held* held = taken_off_list()) delete held;
}

static void put_on_list(Held* held) {
    held->next = over.load();
    while (!over.compare_exchange_weak(held->next, held)) {}
}

// Wait by slices, without the GIL, until `wait(nanoseconds)` says yes.
template <class Wait> static void wait_interruptibly(Wait wait) {
    while (true) {
        bool yes;
        {
            const WithoutGil released;
            yes = wait(SLICE_NS);
        }
        if (yes) return;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

// An engine as Python holds it. To drop one never waits, as that would be with the GIL: where it is
// not closed its thread is left to finish by itself, and in a forked child it is left alone.
class Owned {
public:
    explicit Owned(const Options& options) : engine_(std::make_unique<Engine>(options)) {}
    Owned(const Owned&) = delete;
    ~Owned() {
        if (getpid() != pid_ || !engine_->close(0)) static_cast<void>(engine_.release());
    }
    Engine* operator->() const { return engine_.get(); }

private:
    std::unique_ptr<Engine> engine_;
    const pid_t pid_ = getpid();
};

// A request as Python holds it.
struct PythonRequest {
    std::shared_ptr<Request> inner;

    bool done() const {
        const bool found = inner->done().is_set();
        if (found) settle();
        return found;
    }

    void wait() const {
        if (!inner->done().is_set())
            wait_interruptibly([&](int64_t ns) { return inner->done().wait(ns); });
        settle();
    }

    // None, or what is needed to say what failed.
    nb::object failure() const {
        const Failure& found = inner->failure();
        if (found.code == 0) return nb::none();
        return nb::make_tuple(found.code, int(found.cause), found.offset, found.bytes,
                              found.last_code);
    }
};

static std::optional<PythonRequest> submit(Owned& engine, nb::object file, bool writing,
                                           int64_t align, nb::tuple parts) {
    settle();
    if (nb::cast<bool>(file.attr("closed"))) return std::nullopt;
    auto held = std::make_unique<Held>();
    Transfer transfer{.fd = nb::cast<int>(file.attr("fd")), .writing = writing, .align = align};
    held->file = file;
    for (nb::handle one : parts) {
        const auto part = nb::cast<nb::tuple>(one);
        Py_buffer buffer;
        const int how = writing ? PyBUF_SIMPLE : PyBUF_WRITABLE;
        if (PyObject_GetBuffer(nb::object(part[0]).ptr(), &buffer, how) != 0)
            throw nb::python_error();
        held->buffers.push_back(buffer);
        transfer.parts.push_back(
            {static_cast<std::byte*>(buffer.buf), buffer.len, nb::cast<int64_t>(part[1])});
    }
    Held* const kept = held.get();
    transfer.finished = [kept](const Failure&) { put_on_list(kept); };
    PythonRequest request{engine->submit(std::move(transfer))};
    if (request.inner == nullptr) return std::nullopt;
    held.release();
    return request;
}

// What the system refused, as an OSError of its errno.
static void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
        const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

NB_MODULE(_native, m) {
    m.attr("VERSION") = 6;  // see aio/backends.py
    m.attr("KINDS") = nb::make_tuple("io_uring", "linux_aio", "threads");
    nb::set_leak_warnings(false);  // a transfer under way at exit holds its file and buffers
    nb::register_exception_translator(translate);
    nb::class_<PythonRequest>(m, "Request")
        .def("done", &PythonRequest::done)
        .def("wait", &PythonRequest::wait)
        .def("failure", &PythonRequest::failure);
    nb::class_<Owned>(m, "Engine")
        .def("address", [](Owned& engine) { return uintptr_t(engine.operator->()); })
        .def("__init__",
             [](Owned* self, int kind, int depth, int64_t piece_bytes) {
                 const Options options{Kind(kind), depth, piece_bytes};
                 const WithoutGil released;
                 new (self) Owned(options);
             },
             nb::arg("kind"), nb::arg("depth"), nb::arg("piece_bytes"))
        .def("submit", &submit, nb::arg("file"), nb::arg("writing"), nb::arg("align"),
             nb::arg("parts"))
        .def("drain",
             [](Owned& engine, int fd) {
                 wait_interruptibly([&](int64_t ns) { return engine->drain(fd, ns); });
                 settle();
             })
        .def("fail",
             [](Owned& engine, int64_t number, int code) { return engine->fail(number, code); })
        .def("close", [](Owned& engine) {
            wait_interruptibly([&](int64_t ns) { return engine->close(ns); });
            settle();
        });
    without_gil::prepare_for_the_end();
}
