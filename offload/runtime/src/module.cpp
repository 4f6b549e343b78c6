// What Python sees of the books: `_books.pyi` says what each call does.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "books.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace books;
using without_gil::WithoutGil;

using Spans = std::tuple<uintptr_t, uintptr_t, size_t>;  // see `books.py`

// An op that comes again, by numbers: see `Known` in `books.py`.
struct Known {
    int lane;
    int64_t deadline;
    nb::object op;
    Copy copy;
    Cells reads, writes;
};

static Copy copy_of(std::optional<Spans> spans) {
    if (!spans) return {};
    const auto [into, source, bytes] = *spans;
    if (bytes == 0) throw nb::value_error("a copy of no bytes is nothing that a lane can do");
    return {reinterpret_cast<void*>(into), reinterpret_cast<void*>(source), bytes};
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

    // Queue a task; `waits` where the caller says for whom it waits, else by what it touches.
    nb::object issue(const Known& known, int64_t pass, nb::object run, const PassagePtr& passage,
                     const std::optional<std::vector<TaskPtr>>& waits) {
        const auto task = std::make_shared<Task>();
        task->lane = known.lane;
        task->of_user = run.is_none() && known.copy.bytes == 0;
        task->key = {pass, known.deadline};
        task->copy = known.copy;
        if (run.is_none() && !ops_.empty()) {
            task->number = number_++;
            ops_[size_t(task->number) % ops_.size()] = known.op;
        }
        task->passage = passage;
        nb::object handle = nb::cast(task);
        if (known.copy.bytes == 0 && !task->of_user) {
            handle.attr("op") = known.op;
            handle.attr("run") = run;
            handles_.emplace(task.get(), handle);
        }
        if (waits) {
            books_->add(task, *waits);
        } else {
            books_->issue(task, known.reads, known.writes);
        }
        return handle;
    }
    // The same for the ops of a pass, in their order.
    nb::list issue_all(const std::vector<const Known*>& known, int64_t pass, nb::list runs) {
        nb::list tasks;
        for (size_t at = 0; at < known.size(); at++) {
            tasks.append(issue(*known[at], pass, runs[at], nullptr, std::nullopt));
        }
        return tasks;
    }
    std::vector<TaskPtr> touching(const Cells& reads, const Cells& writes) {
        return books_->touching(reads, writes);
    }
    std::vector<TaskPtr> all() { return books_->all(); }
    size_t most_kept() { return books_->most_kept(); }
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
    nb::object overtaking(int lane, const Task& than) {
        TaskPtr task;
        {
            const WithoutGil released;
            task = books_->overtaking(lane, than);
        }
        return handed(task);
    }
    void stop(bool closing) { books_->stop(closing); }
    void forget() { const auto gone = std::exchange(handles_, {}); }
    std::tuple<double, int64_t, int64_t> copied(int lane) {
        const Copied now = books_->copied(lane);
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
    module.attr("VERSION") = 1;  // as offload/runtime/books.py has it
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
    module.def("make_known", [](int lane, int64_t deadline, nb::object op,
                                std::optional<Spans> spans, Cells reads, Cells writes) {
        return Known{lane, deadline, op, copy_of(spans), std::move(reads), std::move(writes)};
    }, nb::arg("lane"), nb::arg("deadline"), nb::arg("op"), nb::arg("spans").none(),
       nb::arg("reads"), nb::arg("writes"));
    nb::class_<Shared>(module, "Books")
        .def(nb::init<int, int, size_t>())
        .def("issue", &Shared::issue, nb::arg("known"), nb::arg("pass_number"),
             nb::arg("run").none(), nb::arg("passage").none(), nb::arg("waits").none())
        .def("issue_all", &Shared::issue_all)
        .def("touching", &Shared::touching)
        .def("all", &Shared::all)
        .def("most_kept", &Shared::most_kept)
        .def("seal", &Shared::seal)
        .def("cancel", &Shared::cancel)
        .def("begin", &Shared::begin)
        .def("over", &Shared::over)
        .def("finish", &Shared::finish)
        .def("look", &Shared::look)
        .def("take", &Shared::take)
        .def("overtaking", &Shared::overtaking)
        .def("stop", &Shared::stop)
        .def("forget", &Shared::forget)
        .def("copied", &Shared::copied)
        .def("ran", &Shared::ran);
    without_gil::prepare_for_the_end();
}
