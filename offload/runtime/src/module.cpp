// What Python sees of the native runner; `native.py` says what each call does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "../../../cpu_adam/src/crc32c.h"
#include "../../../cpu_adam/src/pool.h"
#include "runner.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace runner;
using without_gil::WithoutGil;

// As Python holds it; nothing in it is Python's, so whoever lets go last needs no GIL.
using PythonWork = std::shared_ptr<Work>;
using PythonSettings = std::shared_ptr<Settings>;

// Lane, deadline, bytes, the number by which Python knows it, the work, what it reads and writes.
using PhaseOp = std::tuple<int, int64_t, int64_t, int64_t, PythonWork, Cells, Cells>;

struct Phase {
    std::vector<PhaseOp> ops;
};

using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Factors =
    nb::ndarray<const float, nb::shape<-1, cpu_adam::FACTORS>, nb::c_contig, nb::device::cpu>;
using PythonPlace = std::pair<uintptr_t, int64_t>;  // as `Where`

static Where where(const PythonPlace& place) {
    if (place.first == 0) throw nb::value_error("a lane was given no memory");
    return {reinterpret_cast<Byte*>(place.first), place.second};
}

static const cpu_adam::Kernel& kernel_at(int index) {
    int count = 0;
    return *cpu_adam::kernels(count)[index];
}

static PythonWork copies(const std::vector<std::tuple<PythonPlace, PythonPlace, size_t>>& given,
                         bool on_device) {
    std::vector<Copy> found;
    for (const auto& [into, source, bytes] : given) {
        found.push_back({where(into), where(source), bytes});
    }
    return std::make_shared<Copies>(std::move(found), on_device);
}

static PythonWork several(const std::vector<PythonWork>& given) {
    return std::make_shared<Several>(std::vector<WorkPtr>(given.begin(), given.end()));
}

static Rows rows_of(const Table& given, std::vector<int64_t> strides) {
    if (int64_t(given.shape(1)) != cpu_adam::ADDRESS_COLUMNS + int64_t(strides.size()))
        throw nb::value_error("the table does not fit the operation");
    return {std::vector<int64_t>(given.data(), given.data() + given.size()), std::move(strides)};
}

static PythonWork sweep_of(int kernel, int operation, int gradient, const Table& table,
                           std::vector<int64_t> strides) {
    const auto& action = kernel_at(kernel).operations[operation].of[gradient];
    if (action.call == nullptr || action.arrays != int(strides.size()))
        throw nb::value_error("the table does not fit the operation");
    return std::make_shared<Sweep>(action, rows_of(table, std::move(strides)));
}

static PythonWork device_sweep_of(const std::string& name, int gradient, int64_t block_elements,
                                  const Table& table, std::vector<int64_t> strides) {
    return std::make_shared<DeviceSweep>(name, cpu_adam::Gradient(gradient), block_elements,
                                          rows_of(table, std::move(strides)));
}

using PythonStretch = std::tuple<int64_t, int64_t, PythonPlace, int64_t>;

static std::vector<Stretch> stretches_of(const std::vector<PythonStretch>& given) {
    std::vector<Stretch> found;
    for (const auto& [leaf, first, at, elements] : given)
        found.push_back({leaf, first, where(at), elements});
    return found;
}

static PythonWork squares_of(int kernel, int gradient, const std::vector<PythonStretch>& given) {
    return std::make_shared<Squares>(kernel_at(kernel), cpu_adam::Gradient(gradient),
                                      stretches_of(given));
}

static PythonWork device_squares_of(int gradient, uintptr_t scratch, int64_t scratch_leaves,
                                    int64_t block_elements,
                                    const std::vector<PythonStretch>& given) {
    return std::make_shared<DeviceSquares>(cpu_adam::Gradient(gradient), where({scratch, 0}).base,
                                           scratch_leaves, block_elements, stretches_of(given));
}

using PythonPart = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t, int64_t>;
using PythonChunk = std::tuple<int64_t, PythonPlace, int64_t, uintptr_t,
                               std::vector<std::vector<PythonPart>>>;

static PythonWork chunks_of(bool writing, const std::vector<PythonChunk>& given, int kernel,
                            uintptr_t moved, uintptr_t step) {
    aio::ChunkTransfer transfer{writing, {}, cpu_adam::crc32c_of(kernel_at(kernel)),
                                reinterpret_cast<aio::Moved*>(moved),
                                reinterpret_cast<const int64_t*>(step)};
    for (const auto& [number, at, bytes, check, homes] : given) {
        aio::Chunk& chunk = transfer.chunks.emplace_back();
        chunk = {number, reinterpret_cast<std::byte*>(where(at).base), at.second, bytes,
                 reinterpret_cast<aio::Check*>(check), {}};
        for (const auto& parts : homes) {
            auto& home = chunk.homes.emplace_back();
            for (const auto& [engine, fd, align, start, count, offset] : parts)
                home.push_back(
                    {reinterpret_cast<aio::Engine*>(engine), fd, align, start, count, offset});
        }
    }
    return std::make_shared<Chunks>(std::move(transfer));
}

using PythonStage = std::tuple<int, PythonWork, int, int64_t>;

static PythonWork stream_of(const std::vector<std::vector<PythonStage>>& given) {
    std::vector<Link> found;
    for (const std::vector<PythonStage>& stages : given) {
        Link& link = found.emplace_back();
        for (const auto& [lane, work, part, bytes] : stages)
            link.push_back({lane, work, Part(part), bytes});
    }
    return std::make_shared<Stream>(std::move(found));
}

static PythonSettings settings_of(const Factors& factors, const std::shared_ptr<Clip>& clip) {
    std::vector<float> all(factors.data(), factors.data() + factors.size());
    return std::make_shared<Settings>(std::move(all), clip);
}

// Queue the ops of a phase, each behind those that touched what it touches.
static std::vector<TaskPtr> start(Runner& runner, const Phase& phase, int64_t pass,
                                  const PythonSettings& settings) {
    std::vector<TaskPtr> tasks;
    for (const auto& [lane, deadline, bytes, number, work, reads, writes] : phase.ops) {
        const auto task = std::make_shared<Task>();
        task->lane = lane;
        task->of_user = work == nullptr;
        task->key = {pass, deadline};
        task->work = work;
        task->bytes = bytes;
        task->number = number;
        task->settings = settings;
        tasks.push_back(task);
        runner.start(task, reads, writes);
    }
    return tasks;
}

static std::shared_ptr<Runner> open_runner(int lanes, int disk, int slots,
                                           int64_t flying_bytes_max, size_t ran_max,
                                           const driver::DriverPtr& driver,
                                           const nb::object& pace, bool threads) {
    Pace paced;
    if (!pace.is_none()) {
        paced = [call = pace.ptr()](const Task& task, double since) {
            const nb::gil_scoped_acquire held;
            const nb::handle told(call);
            return nb::cast<double>(told(task.number, int(task.part), task.bytes, since));
        };
    }
    // In a forked child nobody will ever wake what sleeps here, which its end would wait for.
    const auto close = [pid = getpid()](Runner* runner) {
        if (getpid() != pid) return;
        const WithoutGil released;
        delete runner;
    };
    return {new Runner({lanes, disk, slots, flying_bytes_max, ran_max, driver, std::move(paced),
                        threads}),
            close};
}

// The GIL is let go where it may take a while.
template <bool (Runner::*call)(Task&, double)>
static bool waiting(Runner& runner, Task& task, double seconds) {
    if (seconds <= 0) return (runner.*call)(task, 0);
    const WithoutGil released;
    return (runner.*call)(task, seconds);
}

NB_MODULE(_runner, module) {
    nb::set_leak_warnings(false);  // a model that is still attached at exit holds its ops
    module.attr("VERSION") = 15;  // as offload/runtime/native.py has it
    nb::class_<Task>(module, "Task", nb::dynamic_attr())
        .def_ro("serial", &Task::serial)
        .def_ro("of_user", &Task::of_user)
        .def_prop_ro("over", &Task::over)
        .def_prop_ro("begun", &Task::begun)
        .def_prop_ro("cancelled", [](const Task& task) {
            return task.state == State::CANCELLED;
        });
    nb::class_<Phase>(module, "Phase", nb::dynamic_attr());
    module.def("phase", [](std::vector<PhaseOp> ops) { return Phase{std::move(ops)}; });
    nb::class_<Work>(module, "Work");
    nb::class_<Settings>(module, "Settings");
    nb::class_<Clip>(module, "Clip")
        .def(nb::new_([](double max_norm) { return std::make_shared<Clip>(max_norm); }))
        .def_ro("norm", &Clip::norm)
        .def("parts", [](const Clip& clip) { return clip.parts; })
        .def("put", &Clip::put)
        .def("combine", &Clip::combine);
    module.def("share_pool", [](uintptr_t pool) {
        cpu_adam::Pool::share(reinterpret_cast<cpu_adam::Pool*>(pool));
    });
    nb::class_<driver::Driver>(module, "Driver").def("load", &driver::Driver::load);
    module.def("open_cuda", [](const std::string& library, int ordinal) {
        return std::make_shared<driver::Driver>(library, ordinal);
    });
    module.def("copies", &copies);
    module.def("several", &several);
    module.def("sweep", &sweep_of);
    module.def("device_sweep", &device_sweep_of);
    module.def("squares", &squares_of);
    module.def("device_squares", &device_squares_of);
    module.def("combine", [] { return PythonWork(std::make_shared<Combine>()); });
    module.def("chunks", &chunks_of);
    module.def("stream", &stream_of);
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
    nb::class_<Runner>(module, "Runner")
        .def("start", &start, nb::arg("phase"), nb::arg("pass_number"),
             nb::arg("settings").none() = nb::none())
        .def("touching", &Runner::touching)
        .def("all", &Runner::all)
        .def("cancel", &Runner::cancel)
        .def("begin", &waiting<&Runner::begin>)
        .def("over", &waiting<&Runner::over>)
        .def("finish", &Runner::finish, nb::arg("task"),
             nb::arg("streams") = std::vector<driver::Stream>())
        .def("perform", [](Runner& runner, const PythonWork& work, const PythonSettings& settings,
                           driver::Stream stream) {
            const WithoutGil released;
            runner.perform(*work, settings.get(), stream);
        }, nb::arg("work"), nb::arg("settings").none(), nb::arg("stream"))
        .def("look", &Runner::look)
        .def("first", &Runner::first)
        .def_prop_ro("failed", &Runner::failed)
        .def("rethrow", [](Runner& runner) {
            if (const std::exception_ptr failure = runner.failure())
                std::rethrow_exception(failure);
        })
        .def("stop", &Runner::stop, nb::arg("closing"), nb::call_guard<WithoutGil>())
        .def("used", &Runner::used)
        .def("ran", &Runner::ran);
    module.def("open", &open_runner, nb::arg("lanes"), nb::arg("disk"), nb::arg("slots"),
               nb::arg("flying"), nb::arg("kept"), nb::arg("driver").none(), nb::arg("pace").none(),
               nb::arg("threads"), nb::keep_alive<0, 7>());
    without_gil::prepare_for_the_end();
}
