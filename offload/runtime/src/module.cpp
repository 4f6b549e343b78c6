// What Python sees of the books. `Books` and `NativeWorks` of Python say what each call does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
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
    nb::object op;
    WorkPtr work;
    Cells reads, writes;
};

// What a lane does, as Python holds it: nothing in it is Python's, so whoever lets go needs no GIL.
struct PythonWork {
    WorkPtr inner;
};

struct PythonSettings {
    std::shared_ptr<const Settings> inner;
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

static PythonWork copies(const std::vector<std::tuple<Place, Place, size_t>>& given) {
    std::vector<Copy> found;
    for (const auto& [into, source, bytes] : given) {
        if (bytes == 0) throw nb::value_error("a copy of no bytes is nothing that a lane can do");
        found.push_back({where(into), where(source), bytes});
    }
    return {std::make_shared<Copies>(std::move(found))};
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

static PythonWork squares_of(int kernel, int gradient,
                             const std::vector<std::tuple<size_t, Place, int64_t>>& given) {
    std::vector<Stretch> found;
    for (const auto& [ordinal, at, elements] : given)
        found.push_back({ordinal, where(at), elements});
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

static PythonSettings settings_of(const Factors& factors, const std::shared_ptr<Clip>& clip) {
    std::vector<float> all(factors.data(), factors.data() + factors.size());
    return {std::make_shared<Settings>(Settings{std::move(all), clip})};
}

// So many ops are kept for each one of which is remembered that it ran: of those that are queued
// some run much later, and some never.
constexpr size_t OPS_KEPT = 4;

// The books, and what lanes will do in Python: with the GIL, and never by who copies without it.
class Shared {
public:
    Shared(int lanes, int slots, size_t ran_max)
        : books_(new Books(lanes, slots, ran_max)), pid_(getpid()), ops_(OPS_KEPT * ran_max) {}
    Shared(const Shared&) = delete;
    ~Shared() {
        // In a forked child nobody will ever wake who sleeps here, which its end would wait for.
        if (getpid() == pid_) delete books_;
    }

    // Queue a task behind those that touched what it touches.
    nb::object issue(const Known& known, int64_t pass, nb::object run, const PassagePtr& passage,
                     const PythonSettings* settings) {
        const auto task = std::make_shared<Task>();
        task->lane = known.lane;
        task->of_user = run.is_none() && known.work == nullptr;
        task->key = {pass, known.deadline};
        task->work = known.work;
        task->bytes = known.bytes;
        if (settings != nullptr) task->settings = settings->inner;
        if (run.is_none() && !ops_.empty()) {
            task->number = number_++;
            ops_[size_t(task->number) % ops_.size()] = known.op;
        }
        task->passage = passage;
        nb::object handle = nb::cast(task);
        if (known.work == nullptr && !task->of_user) {
            handle.attr("op") = known.op;
            handle.attr("run") = run;
            handles_.emplace(task.get(), handle);
        }
        books_->issue(task, known.reads, known.writes);
        return handle;
    }
    // The same for the ops of a pass, in their order.
    nb::list issue_all(const std::vector<const Known*>& known, int64_t pass, nb::list runs) {
        nb::list tasks;
        for (size_t at = 0; at < known.size(); at++) {
            tasks.append(issue(*known[at], pass, runs[at], nullptr, nullptr));
        }
        return tasks;
    }
    // The ops of a chunk, in their order, with a passage of their own where they are staged.
    nb::list issue_chunk(const std::vector<const Known*>& known, int64_t pass, bool staged,
                         const PythonSettings* settings) {
        nb::list tasks;
        const PassagePtr passage = staged ? std::make_shared<Passage>() : nullptr;
        for (const Known* one : known)
            tasks.append(issue(*one, pass, nb::none(), passage, settings));
        if (staged) seal(passage);
        return tasks;
    }
    std::vector<TaskPtr> touching(const Cells& reads, const Cells& writes) {
        return books_->touching(reads, writes);
    }
    std::vector<TaskPtr> all() { return books_->all(); }
    void seal(const PassagePtr& passage) { books_->seal(passage); }
    void cancel(const std::vector<TaskPtr>& tasks) {
        books_->cancel(tasks);
        std::vector<nb::object> gone;  // last, as what they hold may come back here as it goes
        for (const TaskPtr& task : tasks) {
            if (!task->over()) continue;
            if (auto found = handles_.extract(task.get())) gone.push_back(found.mapped());
        }
    }
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
    std::tuple<Key, std::vector<int64_t>, std::vector<std::pair<int, double>>> look(
        const Task& task) {
        Seen seen = books_->look(task);
        return {seen.key, std::move(seen.waits), std::move(seen.path)};
    }
    nb::object take(int lane, bool wait) {
        TaskPtr task;
        {
            const WithoutGil released;
            task = books_->take(lane, wait);
        }
        return handed(task);
    }
    void stop(bool closing) { books_->stop(closing); }
    void forget() { const auto gone = std::exchange(handles_, {}); }
    std::tuple<double, int64_t, int64_t> used(int lane) {
        const Used now = books_->used(lane);
        return {now.busy_s, now.bytes, now.operations};
    }
    std::vector<std::tuple<nb::object, double, double>> ran() {
        std::vector<std::tuple<nb::object, double, double>> found;
        for (const Ran& one : books_->ran()) {
            if (one.number + int64_t(ops_.size()) < number_) continue;  // The place is another's.
            found.emplace_back(ops_[size_t(one.number) % ops_.size()], one.start, one.stop);
        }
        return found;
    }

private:
    nb::object handed(const TaskPtr& task) {
        if (!task) return nb::none();
        const auto found = handles_.extract(task.get());
        return found ? found.mapped() : nb::cast(task);
    }

    Books* books_;
    pid_t pid_;
    std::vector<nb::object> ops_;  // the last that are numbered, each at its number in turn
    int64_t number_ = 0;           // of the next one
    std::unordered_map<Task*, nb::object> handles_;
};

NB_MODULE(_books, module) {
    nb::set_leak_warnings(false);  // a model that is still attached at exit holds its ops
    module.attr("VERSION") = 2;  // as offload/runtime/books.py has it
    nb::class_<Passage>(module, "Passage").def_ro("slot", &Passage::slot);
    nb::class_<Task>(module, "Task", nb::dynamic_attr())
        .def_ro("serial", &Task::serial)
        .def_ro("passage", &Task::passage)
        .def_ro("of_user", &Task::of_user)
        .def_ro("began_at", &Task::began_at)
        .def_prop_ro("over", &Task::over)
        .def_prop_ro("settled", &Task::over)
        .def_prop_ro("fences", [](const Task&) { return nb::tuple(); })
        .def_prop_ro("begun", &Task::begun)
        .def_prop_ro("cancelled", [](const Task& task) {
            return task.state == State::CANCELLED;
        });
    module.def("make_passage", [] { return std::make_shared<Passage>(); });
    nb::class_<Known>(module, "Known");
    module.def("make_known", [](int lane, int64_t deadline, int64_t bytes, nb::object op,
                                const PythonWork* work, Cells reads, Cells writes) {
        return Known{lane, deadline, bytes, op, work == nullptr ? nullptr : work->inner,
                     std::move(reads), std::move(writes)};
    }, nb::arg("lane"), nb::arg("deadline"), nb::arg("bytes"), nb::arg("op"),
       nb::arg("work").none(), nb::arg("reads"), nb::arg("writes"));
    nb::class_<PythonWork>(module, "Work");
    nb::class_<PythonSettings>(module, "Settings");
    nb::class_<Clip>(module, "Clip")
        .def(nb::new_([](double max_norm, size_t chunks) {
            return std::make_shared<Clip>(max_norm, chunks);
        }))
        .def("put", &Clip::put)
        .def("combine", &Clip::combine)
        .def_ro("norm", &Clip::norm)
        .def_ro("factor", &Clip::factor);
    module.def("share_pool", [](uintptr_t pool) {
        cpu_adam::Pool::share(reinterpret_cast<cpu_adam::Pool*>(pool));
    });
    module.def("copies", &copies);
    module.def("several", &several);
    module.def("sweep", &sweep_of);
    module.def("squares", &squares_of);
    module.def("combine", [] { return PythonWork{std::make_shared<Combine>()}; });
    module.def("chunks", &chunks_of);
    module.def("settings", &settings_of, nb::arg("factors"), nb::arg("clip").none());
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
        .def(nb::init<int, int, size_t>())
        .def("issue", &Shared::issue, nb::arg("known"), nb::arg("pass_number"),
             nb::arg("run").none(), nb::arg("passage").none() = nb::none(),
             nb::arg("settings").none() = nb::none())
        .def("issue_chunk", &Shared::issue_chunk, nb::arg("known"), nb::arg("pass_number"),
             nb::arg("staged"), nb::arg("settings").none())
        .def("issue_all", &Shared::issue_all)
        .def("touching", &Shared::touching)
        .def("all", &Shared::all)
        .def("seal", &Shared::seal)
        .def("cancel", &Shared::cancel)
        .def("begin", &Shared::begin)
        .def("over", &Shared::over)
        .def("finish", &Shared::finish)
        .def("look", &Shared::look)
        .def("take", &Shared::take)
        .def("stop", &Shared::stop, nb::arg("closing"))
        .def("forget", &Shared::forget)
        .def("used", &Shared::used)
        .def("ran", &Shared::ran);
    without_gil::prepare_for_the_end();
}
