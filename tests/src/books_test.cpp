// The lanes' books without Python, for the sanitizers: `make sanitize`. Ends with 0 where all is
// well. What tasks touch is plain memory: ThreadSanitizer sees any two that were not ordered.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "books.h"

thread_local int64_t allocations_left = -1;  // of this thread; below zero without end

[[gnu::noinline]] void* operator new(size_t bytes) {
    if (allocations_left == 0) throw std::bad_alloc();
    if (allocations_left > 0) allocations_left--;
    if (void* const found = std::malloc(bytes)) return found;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

using namespace books;

namespace {

constexpr int LANES = 3, SLOTS = 2, CELLS = 8, WORDS = 512;
constexpr double LONG_S = 60;  // no wait of a test is as long

void check(bool so, const char* what) {
    if (so) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
}

struct Cell {
    int64_t words[WORDS] = {};
};

// Tasks that are ordered by the cells they touch, on lanes that are threads.
class Model {
public:
    explicit Model(unsigned seed) : luck_(seed) {
        for (int lane = 0; lane < LANES; lane++) {
            threads_.emplace_back([this, lane] { work(lane); });
        }
    }
    ~Model() {
        books.stop(true);
        for (std::thread& thread : threads_) thread.join();
    }

    int any(int below) { return int(luck_() % unsigned(below)); }

    // A task that reads one cell and writes another; a copy of all words, or the user's own.
    TaskPtr submit(int lane, bool copies, bool of_user, const PassagePtr& passage) {
        const int from = any(CELLS), into = (from + 1 + any(CELLS - 1)) % CELLS;
        auto task = std::make_shared<Task>();
        task->lane = lane;
        task->of_user = of_user;
        task->key = {any(4), any(6)};
        task->passage = passage;
        task->number = from * CELLS + into;
        task->copy = {cells[into].words, cells[from].words, 0};
        if (copies) task->copy.bytes = sizeof(Cell::words);
        books.issue(task, {from}, {into});
        return task;
    }

    void run(const Task& task) {
        const int64_t from = task.number / CELLS, into = task.number % CELLS;
        cells[into].words[0] += cells[from].words[0] + 1;
        done++;
    }

    void work(int lane) {
        try {
            while (const TaskPtr task = books.take(lane, true)) {
                run(*task);
                while (const TaskPtr other = books.overtaking(lane, *task)) {
                    run(*other);
                    books.finish(*other);
                }
                books.finish(*task);
            }
        } catch (const std::exception&) {
            failed++;
        }
    }

    Books books{LANES, SLOTS, 64};
    Cell cells[CELLS];
    std::atomic<int> done = 0, failed = 0;

private:
    std::mt19937 luck_;
    std::vector<std::thread> threads_;
};

void begin_and_finish(Model& model, const TaskPtr& task) {
    if (task->over()) return;  // taken back
    check(model.books.begin(*task, LONG_S), "the user's own begins");
    model.run(*task);
    model.books.finish(*task);
}

void test_all_is_ordered(unsigned seed) {
    Model model(seed);
    std::vector<TaskPtr> all, own, open;
    std::atomic<bool> ended = false;
    std::thread watcher([&] {
        while (!ended) {
            for (int lane = 0; lane < LANES; lane++) model.books.copied(lane);
            model.books.ran();
            std::this_thread::yield();
        }
    });
    for (int step = 0; step < 400; step++) {
        const int what = model.any(100);
        if (what < 40) {
            all.push_back(model.submit(model.any(LANES), what < 20, false, nullptr));
            open.push_back(all.back());
        } else if (what < 55) {
            all.push_back(model.submit(0, false, true, nullptr));
            own.push_back(all.back());
        } else if (what < 70) {
            const auto passage = std::make_shared<Passage>();
            for (int count = 1 + model.any(3); count > 0; count--) {
                const bool copies = model.any(2) > 0;
                all.push_back(model.submit(model.any(LANES), copies, false, passage));
            }
            model.books.seal(passage);
        } else if (what < 80 && !open.empty()) {
            model.books.cancel({open[size_t(model.any(int(open.size())))]});
        } else if (what < 85 && !all.empty()) {
            model.books.look(*all[size_t(model.any(int(all.size())))]);
        } else {
            for (const TaskPtr& task : own) begin_and_finish(model, task);
            own.clear();
        }
    }
    for (const TaskPtr& task : own) begin_and_finish(model, task);
    for (const TaskPtr& task : model.books.all()) {
        check(model.books.over(*task, LONG_S), "what touches a place ends");
    }
    for (const TaskPtr& task : all) check(model.books.over(*task, LONG_S), "all end");
    int64_t sum = 0;  // What is over can be read by who has asked.
    for (const Cell& cell : model.cells) sum += cell.words[0];
    check(sum != 0 && model.failed == 0, "tasks have run");
    ended = true;
    watcher.join();
}

void test_stop_ends_all_waits(unsigned seed) {
    Model model(seed);
    const TaskPtr gate = model.submit(0, false, true, nullptr);
    std::vector<TaskPtr> all;
    for (int count = 0; count < 20; count++) {
        all.push_back(model.submit(model.any(LANES), model.any(2) > 0, false, nullptr));
    }
    const TaskPtr behind = model.submit(0, false, true, nullptr);
    std::vector<std::thread> blocked;
    blocked.emplace_back([&] {
        while (model.books.over(*all.back(), LONG_S) || !model.books.over(*gate, 0)) return;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(seed % 3));
    check(model.books.begin(*gate, LONG_S), "the gate begins");
    model.run(*gate);
    model.books.finish(*gate);
    model.books.stop(false);
    model.books.begin(*behind, LONG_S);
    for (std::thread& thread : blocked) thread.join();
}

int torn = 0;  // times that books told so

// Memory runs out for the user's thread at its n-th request: no wait goes on, no lane stays.
bool test_memory_runs_out(int64_t number) {
    Model model{unsigned(number)};
    bool ran_out = false, came = false;
    TaskPtr last;
    std::thread blocked;
    try {
        const TaskPtr gate = model.submit(0, false, true, nullptr);
        last = model.submit(1, false, false, nullptr);
        blocked = std::thread([&] {
            try {
                came = model.books.over(*last, LONG_S);
            } catch (const std::runtime_error&) {
            }
        });
        allocations_left = number;
        const auto passage = std::make_shared<Passage>();
        for (int count = 0; count < 3; count++) model.submit(count, count == 1, false, passage);
        model.books.seal(passage);
        model.books.cancel({model.submit(0, false, false, nullptr)});
        begin_and_finish(model, gate);
    } catch (const std::bad_alloc&) {
        ran_out = true;
    }
    allocations_left = -1;
    try {
        if (ran_out && !model.books.over(*last, 0)) model.books.stop(false);  // not in the books
    } catch (const std::runtime_error&) {
        torn++;
    }
    blocked.join();
    check(ran_out || came, "all ends where memory is enough");
    return ran_out;
}

void test_what_must_not_be_is_refused() {
    Books books(1, 1, 1);
    int refused = 0;
    const auto refuses = [&](auto call) {
        try {
            call();
        } catch (const std::logic_error&) {
            refused++;
        }
    };
    const auto task = std::make_shared<Task>();
    books.add(task, {});
    refuses([&] { books.add(task, {}); });
    refuses([&] { books.finish(*task); });
    refuses([&] { books.seal(std::make_shared<Passage>()); });
    check(refused == 3, "what must not be is refused");
    check(books.take(0, false) == task, "and changes nothing");
    books.finish(*task);
}

}  // namespace

int main(int count, char** values) {
    const unsigned seeds = count > 1 ? unsigned(std::atoi(values[1])) : 100;
    test_what_must_not_be_is_refused();
    for (unsigned seed = 0; seed < seeds; seed++) {
        test_all_is_ordered(seed);
        test_stop_ends_all_waits(seed);
    }
    int64_t number = 0;
    while (test_memory_runs_out(number)) number++;
    check(torn > 10, "memory ran out while books were written");
    std::printf("books: %u seeds, memory ran out at %lld requests, %d in the books\n",
                seeds, static_cast<long long>(number), torn);
}
