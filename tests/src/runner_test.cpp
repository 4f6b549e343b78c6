// The native runner without Python, for the sanitizers: `make sanitize`. Ends with 0 where all is
// well. What tasks touch is plain memory: ThreadSanitizer sees any two that were not ordered.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>

#include "runner.h"

// What is under test here makes no updates.
void cpu_adam::sweep(const Action&, const Table&) {}
cpu_adam::Nodes cpu_adam::square_sums(const Kernel&, Gradient, const Byte*, int64_t, int64_t) {
    return {};
}

using namespace runner;

namespace {

constexpr int LANES = 3, DISK = 0, DOWN = 1, UP = 2, SLOTS = 3, CELLS = 8, WORDS = 512;
constexpr double LONG_S = 60;  // no wait of a test is as long

void check(bool so, const char* what) {
    if (so) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
}

struct Cell {
    int64_t words[WORDS] = {};
};

Where where(Cell& cell, int64_t stride = 0) {
    return {reinterpret_cast<Byte*>(cell.words), stride};
}

WorkPtr copy_of(Where into, Where from, bool on_device) {
    return std::make_shared<Copies>(std::vector<Copy>{{into, from, sizeof(Cell::words)}},
                                    on_device);
}

// One cell is added to another.
class Mix : public Work {
public:
    Mix(Cell* into, const Cell* from) : into_(into), from_(from) {}
    void run(int, const Settings*) const override { into_->words[0] += from_->words[0] + 1; }

private:
    Cell* into_;
    const Cell* from_;
};

// Tasks that are ordered by the cells they touch.
class Model {
public:
    explicit Model(unsigned seed, const driver::DriverPtr& driver = nullptr)
        : device(driver), luck_(seed),
          runner({LANES, DISK, SLOTS, 64 << 20, 64, driver, {}, true}) {}

    int any(int below) { return int(luck_() % unsigned(below)); }

    // A task that reads one cell and writes another: a copy of all words, a sum, or the user's own.
    TaskPtr submit(int lane, bool copies, bool of_user) {
        const int from = any(CELLS), into = (from + 1 + any(CELLS - 1)) % CELLS;
        auto task = std::make_shared<Task>();
        task->lane = lane;
        task->of_user = of_user;
        task->key = {any(4), any(6)};
        task->number = from * CELLS + into;
        if (copies) task->work = copy_of(where(cells[into]), where(cells[from]), device != nullptr);
        else if (!of_user) task->work = std::make_shared<Mix>(&cells[into], &cells[from]);
        runner.start(task, {from}, {into});
        return task;
    }

    // What the user's own does.
    void run(const Task& task) {
        Mix(&cells[task.number % CELLS], &cells[task.number / CELLS]).run(0, nullptr);
    }

    const driver::DriverPtr device;
    Cell cells[CELLS];

private:
    std::mt19937 luck_;

public:
    Runner runner;  // the last: its lanes end first
};

void begin_and_finish(Model& model, const TaskPtr& task) {
    if (task->over()) return;  // taken back
    for (int tries = 0; !model.runner.begin(*task, tries % 2 * 0.01); tries++)
        check(tries < 100 * int(LONG_S), "the user's own begins");
    model.run(*task);
    model.runner.finish(*task, {});
}

void test_all_is_ordered(unsigned seed) {
    Model model(seed);
    std::vector<TaskPtr> all, own, open;
    std::atomic<bool> ended = false;
    std::thread watcher([&] {
        while (!ended) {
            for (int lane = 0; lane < LANES; lane++) model.runner.used(lane);
            model.runner.ran();
            std::this_thread::yield();
        }
    });
    for (int step = 0; step < 400; step++) {
        const int what = model.any(100);
        if (what < 40) {
            all.push_back(model.submit(model.any(LANES), what < 20, false));
            open.push_back(all.back());
        } else if (what < 55) {
            all.push_back(model.submit(0, false, true));
            own.push_back(all.back());
        } else if (what < 80 && !open.empty()) {
            model.runner.cancel({open[size_t(model.any(int(open.size())))]});
        } else if (what < 85 && !all.empty()) {
            model.runner.look(*all[size_t(model.any(int(all.size())))]);
        } else {
            for (const TaskPtr& task : own) begin_and_finish(model, task);
            own.clear();
        }
    }
    for (const TaskPtr& task : own) begin_and_finish(model, task);
    for (const TaskPtr& task : model.runner.all()) {
        check(model.runner.over(*task, LONG_S), "what touches a place ends");
    }
    for (const TaskPtr& task : all) check(model.runner.over(*task, LONG_S), "all end");
    int64_t sum = 0;  // What is over can be read by who has asked.
    for (const Cell& cell : model.cells) sum += cell.words[0];
    check(sum != 0 && !model.runner.failed(), "tasks have run");
    ended = true;
    watcher.join();
}

void test_stop_ends_all_waits(unsigned seed) {
    Model model(seed);
    const TaskPtr gate = model.submit(0, false, true);
    std::vector<TaskPtr> all;
    for (int count = 0; count < 20; count++) {
        all.push_back(model.submit(model.any(LANES), model.any(2) > 0, false));
    }
    const TaskPtr behind = model.submit(0, false, true);
    std::vector<std::thread> blocked;
    blocked.emplace_back([&] {
        while (model.runner.over(*all.back(), LONG_S) || !model.runner.over(*gate, 0)) return;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(seed % 3));
    check(model.runner.begin(*gate, LONG_S), "the gate begins");
    model.run(*gate);
    model.runner.finish(*gate, {});
    model.runner.stop(false);
    model.runner.begin(*behind, LONG_S);
    for (std::thread& thread : blocked) thread.join();
}

// Who comes behind writes that were taken back waits for the one before them.
void test_what_is_taken_back_hides_nothing() {
    Model model(0);
    const auto writes = [&](bool of_user) {
        auto task = std::make_shared<Task>();
        task->of_user = of_user;
        if (!of_user) task->work = std::make_shared<Mix>(&model.cells[0], &model.cells[1]);
        model.runner.start(task, {}, {0});
        return task;
    };
    const TaskPtr first = writes(true);
    check(model.runner.begin(*first, LONG_S), "the first begins");
    model.runner.cancel({writes(false), writes(false)});
    const TaskPtr last = writes(false);
    check(!model.runner.over(*last, 0.01), "the last waits for it");
    model.runner.finish(*first, {});
    check(model.runner.over(*last, LONG_S), "and runs behind it");
}

// A sum in the place of a checksum: what is looked for here is who reads what when.
uint32_t sum_of(uint32_t crc, const Byte* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at++) crc = crc * 31 + data[at];
    return crc;
}

class Plus : public Work {
public:
    explicit Plus(Cell* stage) : stage_(stage) {}
    void run(int slot, const Settings*) const override {
        for (int64_t& word : stage_[slot].words) word++;
    }

private:
    Cell* stage_;
};

// Cells go to a file and come back, with copies and streams between: all as if one after the other.
void test_flights(unsigned seed) {
    char name[] = "/tmp/runner_test_XXXXXX";
    const int fd = mkstemp(name);
    unlink(name);
    constexpr int64_t BYTES = sizeof(Cell::words);
    aio::Check checks[CELLS] = {};
    aio::Moved moved{};
    int64_t step = 7, files[CELLS] = {};
    int fds[] = {fd, -1};
    aio::Engine engine({.kind = aio::Kind::threads, .depth = 4, .piece_bytes = BYTES / 4});
    const auto chunks = [&](Cell* memory, int64_t stride, int place, bool writing, int file) {
        const auto at = reinterpret_cast<std::byte*>(memory->words);
        aio::Chunk chunk{place, at, stride, BYTES, &checks[place], {}};
        for (int home = 0; home < 1 + place % 2; home++) {  // Every other cell has two homes.
            auto& parts = chunk.homes.emplace_back();
            for (int64_t part = 0; part < 2; part++)
                parts.push_back({&engine, fds[file], 1, part * BYTES / 2, BYTES / 2,
                                 (home * CELLS + place) * BYTES + part * BYTES / 2});
        }
        return std::make_shared<Chunks>(
            aio::ChunkTransfer{writing, {chunk}, &sum_of, &moved, &step});
    };
    const auto transfer = [&](Model& model, int cell, int place, bool writing, int file) {
        auto task = std::make_shared<Task>();
        task->key = {model.any(4), model.any(6)};
        task->work = chunks(&model.cells[cell], 0, place, writing, file);
        const Cells memory{cell}, there{CELLS + place};
        model.runner.start(task, writing ? memory : there, writing ? there : memory);
        return task;
    };
    Cell stage[SLOTS];
    // Adds one to what lies in some places of the file, by slots that others have in turns.
    const auto stream = [&](Model& model, int first, int count) {
        std::vector<Link> links;
        Cells there;
        const int lane = 1 + model.any(2);
        for (int place = first; place < first + count; place++) {
            links.push_back({{DISK, chunks(stage, BYTES, place, false, 0), Part::READ, BYTES},
                             {lane, std::make_shared<Plus>(stage), Part::WORK, BYTES},
                             {DISK, chunks(stage, BYTES, place, true, 0), Part::WRITE, BYTES}});
            there.push_back(CELLS + place);
        }
        auto task = std::make_shared<Task>();
        task->lane = lane;
        task->key = {model.any(4), model.any(6)};
        task->work = std::make_shared<Stream>(std::move(links));
        model.runner.start(task, there, there);
        return task;
    };
    {
        Model model(seed);
        int64_t expected[CELLS] = {};
        std::vector<TaskPtr> all;
        for (int cell = 0; cell < CELLS; cell++) {
            for (int64_t& word : model.cells[cell].words) word = cell + 1;
            files[cell] = expected[cell] = cell + 1;
            all.push_back(transfer(model, cell, cell, true, 0));
        }
        for (int turn = 0; turn < 150; turn++) {
            const int one = model.any(CELLS), other = (one + 1 + model.any(CELLS - 1)) % CELLS;
            const int what = model.any(4);
            if (what == 3) {
                const int first = model.any(CELLS), count = 1 + model.any(CELLS - first);
                all.push_back(stream(model, first, count));
                for (int place = first; place < first + count; place++) files[place]++;
            } else if (what == 0) {
                auto task = std::make_shared<Task>();
                task->lane = 1 + model.any(2);
                task->key = {model.any(4), model.any(6)};
                task->work = copy_of(where(model.cells[one]), where(model.cells[other]), false);
                model.runner.start(task, {other}, {one});
                all.push_back(task);
                expected[one] = expected[other];
            } else {
                all.push_back(transfer(model, one, other, what == 1, 0));
                if (what == 1) files[other] = expected[one];
                else expected[one] = files[other];
            }
        }
        for (const TaskPtr& task : all) check(model.runner.over(*task, LONG_S), "flights land");
        for (int cell = 0; cell < CELLS; cell++)
            for (const int64_t word : model.cells[cell].words)
                check(word == expected[cell], "what came back is what went");
        check(moved.read > 0 && moved.written >= CELLS * BYTES, "bytes are counted");
        check(checks[0].step == step && checks[0].ended == checks[0].begun, "writes are noted");
    }
    Model model(seed);
    checks[1].crc ^= 1;
    const int bad = model.any(3);  // a wrong checksum, a bad descriptor, what was never written
    const bool streams = bad != 1 && model.any(2) > 0;
    if (bad == 2) checks[1].ended--;
    for (int cell = 2; cell < CELLS; cell++) transfer(model, cell, cell, true, 0);
    if (streams) stream(model, 0, CELLS);
    else transfer(model, 1, 1, bad == 1, bad == 1);
    for (int count = 0; !model.runner.failed(); count++) {
        check(count < int(LONG_S * 1000), "a failed transfer is told");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const bool landed = engine.drain(fd, 1'000'000'000) && engine.drain(-1, 1'000'000'000);
    check(landed, "and nothing is under way then");
    close(fd);
}

// The stand-in for the library of CUDA's driver, and its calls for tests.
struct StandIn {
    explicit StandIn(const char* path) : path(path), handle(dlopen(path, RTLD_NOW)) {
        check(handle != nullptr, "the stand-in is there");
    }
    template <typename... Arguments>
    int call(const char* name, Arguments... arguments) const {
        return reinterpret_cast<int (*)(Arguments...)>(dlsym(handle, name))(arguments...);
    }
    const char* path;
    void* handle;
};

// Cells of the device go down to a stage, have one added, and up again, between copies and what the
// user's own stream does to them: all as if one after the other.
void test_a_device(unsigned seed, const StandIn& stand_in) {
    stand_in.call("stand_in_reset", seed, 200u);
    const driver::DriverPtr device = std::make_shared<driver::Driver>(stand_in.path, 0);
    const driver::Stream users = device->make_stream();
    {
        Cell stage[SLOTS];
        Model model(seed, device);
        int64_t expected[CELLS] = {};
        std::vector<TaskPtr> all;
        for (int turn = 0; turn < 60; turn++) {
            const int into = model.any(CELLS), from = (into + 1 + model.any(CELLS - 1)) % CELLS;
            auto task = std::make_shared<Task>();
            task->lane = model.any(LANES);
            task->key = {model.any(4), model.any(6)};
            const int what = model.any(3);
            if (what == 0) {
                const Where here = where(stage[0], sizeof(Cell));
                task->work = std::make_shared<Stream>(std::vector<Link>{
                    {{DOWN, copy_of(here, where(model.cells[into]), true), Part::DOWN, 1},
                     {task->lane, std::make_shared<Plus>(stage), Part::WORK, 1},
                     {UP, copy_of(where(model.cells[into]), here, true), Part::UP, 1}}});
                model.runner.start(task, {into}, {into});
                expected[into]++;
            } else {
                task->of_user = what == 1;
                const WorkPtr copy =
                    copy_of(where(model.cells[into]), where(model.cells[from]), true);
                if (!task->of_user) task->work = copy;
                model.runner.start(task, {from}, {into});
                expected[into] = expected[from];
                if (task->of_user) {
                    check(model.runner.begin(*task, LONG_S), "the user's own begins");
                    copy->queue(*device, users, 0, nullptr);
                    model.runner.finish(*task, {users});
                }
            }
            all.push_back(task);
        }
        for (const TaskPtr& task : all) check(model.runner.over(*task, LONG_S), "all end");
        for (int cell = 0; cell < CELLS; cell++)
            for (const int64_t word : model.cells[cell].words)
                check(word == expected[cell], "the device's cells are as one after the other");
        check(!model.runner.failed(), "no call has failed");
    }
    {
        Model model(seed, device);
        stand_in.call("stand_in_fail", stand_in.call("stand_in_calls") + 1 + model.any(20), 1);
        for (int count = 0; count < 20; count++) model.submit(model.any(LANES), true, false);
        for (int count = 0; !model.runner.failed(); count++) {
            check(count < int(LONG_S * 1000), "a call that fails is told");
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        stand_in.call("stand_in_drain");
        stand_in.call("stand_in_fail", 0, 0);
    }
    device->end_stream(users);
}

void test_what_must_not_be_is_refused() {
    Runner runner({1, 0, 1, 1, 1, nullptr, {}, false});
    int refused = 0;
    const auto refuses = [&](auto call) {
        try {
            call();
        } catch (const std::logic_error&) {
            refused++;
        }
    };
    const auto task = std::make_shared<Task>();
    runner.start(task, {}, {});
    refuses([&] { runner.start(task, {}, {}); });
    refuses([&] { runner.finish(*task, {}); });
    check(refused == 2, "what must not be is refused");
    check(runner.first(0) == task, "and changes nothing");
    runner.finish(*task, {});
}

}  // namespace

int main(int count, char** values) {
    check(count > 1, "the stand-in is named");
    const StandIn stand_in(values[1]);
    const unsigned seeds = count > 2 ? unsigned(std::atoi(values[2])) : 100;
    test_what_must_not_be_is_refused();
    test_what_is_taken_back_hides_nothing();
    for (unsigned seed = 0; seed < seeds; seed++) {
        test_all_is_ordered(seed);
        test_stop_ends_all_waits(seed);
        test_flights(seed);
        test_a_device(seed, stand_in);
    }
    std::printf("runner: %u seeds\n", seeds);
}
