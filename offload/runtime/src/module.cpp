// What Python sees of the books. `Books` and `NativeWorks` of Python say what each call does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "../../../cpu_adam/src/crc32c.h"
#include "../../../cpu_adam/src/pool.h"
#include "books.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace books;
using without_gil::WithoutGil;

// An op that comes again, by numbers: see `Known` in `books.py`.
struct Known {
    int lane;
    int64_t deadline, bytes;
    nb::object op, call;  // what of Python does it, where that is to
    WorkPtr work;
    Cells reads, writes;
    bool of_user;
};

// What a lane does, as Python holds it: nothing in it is Python's, so whoever lets go needs no GIL.
struct PythonWork {
    WorkPtr inner;
};

struct PythonSettings {
    std::shared_ptr<const Settings> inner;
    nb::object python;  // what works in Python are given
};

using Rows = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Factors =
    nb::ndarray<const float, nb::shape<-1, cpu_adam::FACTORS>, nb::c_contig, nb::device::cpu>;
using Place = std::pair<uintptr_t, int64_t>;  // as `Where`

static Where where(const Place& place) {
    if (place.first == 0) throw nb::value_error("a lane was given no memory");
    return {reinterpret_cast<Byte*>(place.first), place.second};
}

static const cpu_adam::Kernel& kernel_at(int index) {
    int count = 0;
    const cpu_adam::Kernel* const* found = cpu_adam::kernels(count);
    if (index < 0 || index >= count) throw nb::index_error("no such kernel");
    return *found[index];
}

static cpu_adam::Gradient gradient_of(int number) {
    if (number < 0 || number >= cpu_adam::GRADIENTS) throw nb::index_error("no such gradient");
    return cpu_adam::Gradient(number);
}

static PythonWork copies(const std::vector<std::tuple<Place, Place, size_t>>& given,
                         bool on_device) {
    std::vector<Copy> found;
    for (const auto& [into, source, bytes] : given) {
        if (bytes == 0) throw nb::value_error("a copy of no bytes is nothing that a lane can do");
        found.push_back({where(into), where(source), bytes});
    }
    return {std::make_shared<Copies>(std::move(found), on_device)};
}

static PythonWork several(const std::vector<const PythonWork*>& given) {
    std::vector<WorkPtr> found;
    for (const PythonWork* one : given) found.push_back(one->inner);
    return {std::make_shared<Several>(std::move(found))};
}

static PythonWork sweep_of(int kernel, int operation, int gradient, const Rows& rows,
                           std::vector<int64_t> strides) {
    if (operation < 0 || operation >= cpu_adam::OPERATIONS_COUNT)
        throw nb::index_error("no such operation");
    const auto& action = kernel_at(kernel).operations[operation].of[gradient_of(gradient)];
    const int64_t columns = cpu_adam::ADDRESS_COLUMNS + action.arrays;
    if (action.call == nullptr || int64_t(rows.shape(1)) != columns)
        throw nb::value_error("the table does not fit the operation");
    std::vector<int64_t> all(rows.data(), rows.data() + rows.size());
    return {std::make_shared<Sweep>(action, std::move(all), std::move(strides))};
}

using PythonStretch = std::tuple<int64_t, int64_t, Place, int64_t>;

static PythonWork squares_of(int kernel, int gradient, const std::vector<PythonStretch>& given) {
    std::vector<Stretch> found;
    for (const auto& [leaf, first, at, elements] : given)
        found.push_back({leaf, first, where(at), elements});
    return {std::make_shared<Squares>(kernel_at(kernel), gradient_of(gradient), std::move(found))};
}

using PythonPart = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t, int64_t>;
using PythonChunk = std::tuple<int64_t, Place, int64_t, uintptr_t, std::vector<PythonPart>>;

static PythonWork chunks_of(bool writing, const std::vector<PythonChunk>& given, int kernel,
                            uintptr_t moved, uintptr_t step) {
    aio::ChunkTransfer transfer{writing, {}, cpu_adam::crc32c_of(kernel_at(kernel)),
                                reinterpret_cast<aio::Moved*>(moved),
                                reinterpret_cast<const int64_t*>(step)};
    for (const auto& [number, at, bytes, check, parts] : given) {
        aio::Chunk& chunk = transfer.chunks.emplace_back();
        chunk = {number, reinterpret_cast<std::byte*>(where(at).base), at.second, bytes,
                 reinterpret_cast<aio::Check*>(check), {}};
        for (const auto& [engine, fd, align, start, count, offset] : parts)
            chunk.parts.push_back(
                {reinterpret_cast<aio::Engine*>(engine), fd, align, start, count, offset});
        if (chunk.parts.empty()) throw nb::value_error("a chunk lies nowhere");
    }
    return {std::make_shared<Chunks>(std::move(transfer))};
}

using PythonStage = std::tuple<int, const PythonWork*, int, int64_t>;

static PythonWork stream_of(const std::vector<std::vector<PythonStage>>& given) {
    std::vector<Link> found;
    for (const std::vector<PythonStage>& stages : given) {
        Link& link = found.emplace_back();
        for (const auto& [lane, work, part, bytes] : stages)
            link.push_back({lane, work->inner, Part(part), bytes});
        if (link.empty()) throw nb::value_error("a chunk of a stream has no work");
    }
    return {std::make_shared<Stream>(std::move(found))};
}

static PythonSettings settings_of(const Factors& factors, const std::shared_ptr<Clip>& clip,
                                  nb::object python) {
    std::vector<float> all(factors.data(), factors.data() + factors.size());
    return {std::make_shared<Settings>(Settings{std::move(all), clip}), std::move(python)};
}

// So many ops are kept for each one of which is remembered that it ran: of those that are queued
// some run much later, and some never.
constexpr size_t OPS_KEPT = 4;

// The books, and Python's ops of what was issued lately.
class Shared {
public:
    Shared(int lanes, int disk, int slots, size_t ran_max, const driver::DriverPtr& driver)
        : books_(new Books(lanes, disk, slots, ran_max, driver)), pid_(getpid()),
          ops_(OPS_KEPT * ran_max) {}
    Shared(const Shared&) = delete;
    ~Shared() {
        // In a forked child nobody will ever wake who sleeps here, which its end would wait for.
        if (getpid() == pid_) delete books_;
    }

    // Queue ops, each behind those that touched what it touches.
    std::vector<TaskPtr> issue(const std::vector<const Known*>& ops, int64_t pass,
                               const PythonSettings* settings) {
        std::vector<TaskPtr> tasks;
        for (const Known* one : ops) {
            tasks.push_back(task_of(*one, pass, settings));
            books_->issue(tasks.back(), one->reads, one->writes);
        }
        return tasks;
    }
    std::vector<TaskPtr> touching(const Cells& reads, const Cells& writes) {
        return books_->touching(reads, writes);
    }
    std::vector<TaskPtr> all() { return books_->all(); }
    void cancel(const std::vector<TaskPtr>& tasks) { books_->cancel(tasks); }
    bool begin(Task& task, double seconds) {
        if (seconds <= 0) return books_->begin(task, 0);
        const WithoutGil released;
        return books_->begin(task, seconds);
    }
    bool over(Task& task, double seconds) {
        if (seconds <= 0) return books_->over(task, 0);
        const WithoutGil released;
        return books_->over(task, seconds);
    }
    void finish(Task& task) { books_->finish(task); }
    void finish_later(Task& task, const std::vector<driver::Stream>& streams) {
        books_->finish(task, streams);
    }
    void end() {
        const WithoutGil released;
        books_->end();
    }
    std::tuple<Key, std::vector<int64_t>, std::vector<std::pair<int, double>>> look(
        const Task& task) {
        Seen seen = books_->look(task);
        return {seen.key, std::move(seen.waits), std::move(seen.path)};
    }
    TaskPtr take(int lane, bool wait) {
        const WithoutGil released;
        return books_->take(lane, wait);
    }
    // The op, the work and the settings of a task that `take` returned.
    nb::object call(const Task& task) {
        const auto found = calls_.extract(task.call);
        return found.empty() ? nb::none() : found.mapped();
    }
    void stop(bool closing) {
        books_->stop(closing);
        if (closing) calls_.clear();
    }
    std::tuple<double, int64_t, int64_t> used(int lane) {
        const Used now = books_->used(lane);
        return {now.busy_s, now.bytes, now.operations};
    }
    std::vector<std::tuple<nb::object, int, int64_t, double, double>> ran() {
        std::vector<std::tuple<nb::object, int, int64_t, double, double>> found;
        for (const Ran& one : books_->ran()) {
            if (one.number + int64_t(ops_.size()) < number_) continue;  // The place is another's.
            found.emplace_back(ops_[size_t(one.number) % ops_.size()], int(one.part), one.bytes,
                               one.start, one.stop);
        }
        return found;
    }

private:
    TaskPtr task_of(const Known& known, int64_t pass, const PythonSettings* settings) {
        const auto task = std::make_shared<Task>();
        task->lane = known.lane;
        task->of_user = known.of_user;
        task->key = {pass, known.deadline};
        task->work = known.work;
        task->bytes = known.bytes;
        if (settings != nullptr) task->settings = settings->inner;
        if (!known.call.is_none()) {
            task->call = ++last_call_;
            const nb::object given = settings == nullptr ? nb::none() : settings->python;
            calls_.emplace(task->call, nb::make_tuple(known.op, known.call, given));
        }
        if (!ops_.empty()) {
            task->number = number_++;
            ops_[size_t(task->number) % ops_.size()] = known.op;
        }
        return task;
    }

    Books* books_;
    pid_t pid_;
    std::vector<nb::object> ops_;  // the last that are numbered, each at its number in turn
    int64_t number_ = 0;           // of the next one
    std::unordered_map<int64_t, nb::object> calls_;  // of tasks that Python has still to take
    int64_t last_call_ = 0;
};

NB_MODULE(_books, module) {
    nb::set_leak_warnings(false);  // a model that is still attached at exit holds its ops
    module.attr("VERSION") = 7;  // as offload/runtime/books.py has it
    nb::class_<Task>(module, "Task", nb::dynamic_attr())  // of lanes in Python
        .def_ro("serial", &Task::serial)
        .def_ro("of_user", &Task::of_user)
        .def_ro("began_at", &Task::began_at)
        .def_prop_ro("over", &Task::over)
        .def_prop_ro("begun", &Task::begun)
        .def_prop_ro("cancelled", [](const Task& task) {
            return task.state == State::CANCELLED;
        });
    nb::class_<Known>(module, "Known").def_ro("op", &Known::op);
    module.def("make_known", [](int lane, int64_t deadline, int64_t bytes, nb::object op,
                                nb::object work, Cells reads, Cells writes, bool of_user) {
        const PythonWork* native = nullptr;
        if (nb::try_cast(work, native) && native != nullptr) work = nb::none();
        return Known{lane, deadline, bytes, op, work, native == nullptr ? nullptr : native->inner,
                     std::move(reads), std::move(writes), of_user};
    }, nb::arg("lane"), nb::arg("deadline"), nb::arg("bytes"), nb::arg("op"),
       nb::arg("work").none(), nb::arg("reads"), nb::arg("writes"), nb::arg("of_user"));
    nb::class_<PythonWork>(module, "Work");
    nb::class_<PythonSettings>(module, "Settings");
    nb::class_<Clip>(module, "Clip")
        .def(nb::new_([](double max_norm) { return std::make_shared<Clip>(max_norm); }))
        .def("put", &Clip::put)
        .def("combine", &Clip::combine)
        .def_ro("norm", &Clip::norm)
        .def_ro("factor", &Clip::factor);
    module.def("share_pool", [](uintptr_t pool) {
        cpu_adam::Pool::share(reinterpret_cast<cpu_adam::Pool*>(pool));
    });
    nb::class_<driver::Driver>(module, "Driver");
    module.def("open_cuda", &driver::open_cuda);
    module.def("copies", &copies, nb::arg("copies"), nb::arg("on_device") = false);
    module.def("several", &several);
    module.def("sweep", &sweep_of);
    module.def("squares", &squares_of);
    module.def("combine", [] { return PythonWork{std::make_shared<Combine>()}; });
    module.def("chunks", &chunks_of);
    module.def("stream", &stream_of);
    module.def("settings", &settings_of, nb::arg("factors"), nb::arg("clip").none(),
               nb::arg("python"));
    static nb::exception<aio::ChunkFailed> failed(module, "ChunkFailed", PyExc_OSError);
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const aio::ChunkFailed& one) {
            const auto& [code, cause, offset, bytes, last_code] = one.failure;
            const nb::tuple told = nb::make_tuple(one.writing, one.number, code, int(cause), offset,
                                                  bytes, last_code, one.found);
            PyErr_SetObject(failed.ptr(), told.ptr());
        }
    });
    nb::class_<Shared>(module, "Books")
        .def(nb::init<int, int, int, size_t, const driver::DriverPtr&>(), nb::arg("lanes"),
             nb::arg("disk"), nb::arg("slots"), nb::arg("kept"), nb::arg("driver").none())
        .def("issue", &Shared::issue, nb::arg("ops"), nb::arg("pass_number"),
             nb::arg("settings").none() = nb::none())
        .def("touching", &Shared::touching)
        .def("all", &Shared::all)
        .def("cancel", &Shared::cancel)
        .def("begin", &Shared::begin)
        .def("over", &Shared::over)
        .def("finish", &Shared::finish)
        .def("finish_later", &Shared::finish_later)
        .def("end", &Shared::end)
        .def("call", &Shared::call)
        .def("look", &Shared::look)
        .def("take", &Shared::take)
        .def("stop", &Shared::stop, nb::arg("closing"))
        .def("used", &Shared::used)
        .def("ran", &Shared::ran);
    without_gil::prepare_for_the_end();
}
