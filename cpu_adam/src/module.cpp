// What Python sees of the kernels: addresses and sizes in, nothing kept.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "crc32c.h"
#include "kernel.h"
#include "pool.h"
#include "sweep.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace cpu_adam;
using without_gil::WithoutGil;

using Rows = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Factors =
    nb::ndarray<const float, nb::shape<-1, FACTORS>, nb::c_contig, nb::device::cpu>;

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Up to here a CRC takes some microseconds at most: to hand the GIL over and wait for it is longer.
constexpr int64_t CRC_UNDER_GIL_BYTES = 8192;

static const Kernel& kernel_at(int index) {
    int count = 0;
    const Kernel* const* found = kernels(count);
    if (index < 0 || index >= count) throw nb::index_error("no such kernel");
    return *found[index];
}

static std::vector<std::string> kernel_names() {
    int count = 0;
    const Kernel* const* found = kernels(count);
    std::vector<std::string> names;
    for (int i = 0; i < count; i++) names.push_back(found[i]->name);
    return names;
}

// meanwhile: called with the GIL while the other threads are at work already.
static void run(int kernel, int operation, int gradient, const Rows& rows, const Factors& factors,
                const std::optional<Checksums>& checksums, const nb::object& meanwhile) {
    if (operation < 0 || operation >= OPERATIONS_COUNT || gradient < 0 || gradient >= GRADIENTS)
        throw nb::index_error("no such operation");
    const Action& chosen = kernel_at(kernel).operations[operation].of[gradient];
    if (chosen.call == nullptr || int64_t(rows.shape(1)) != ADDRESS_COLUMNS + chosen.arrays)
        throw nb::value_error("the table does not fit the operation");
    const Table table{rows.data(), int64_t(rows.shape(0)), int64_t(rows.shape(1)), factors.data()};
    for (int64_t row = 0; row < table.count; row++) {
        const int64_t* columns = table.rows + row * table.columns;
        if (columns[ELEMENTS_COLUMN] < 0 || columns[FACTORS_COLUMN] < 0 ||
            columns[FACTORS_COLUMN] >= int64_t(factors.shape(0)) || columns[FIRST_COLUMN] < 0)
            throw nb::index_error("a row of the table is out of range");
        const int64_t* addresses = columns + ADDRESS_COLUMNS;
        if (columns[ELEMENTS_COLUMN] > 0 &&
            std::find(addresses, addresses + chosen.arrays, 0) != addresses + chosen.arrays)
            throw nb::value_error("a row of the table has no memory");
    }
    if (checksums && (int64_t(checksums->shape(0)) != table.count ||
                      int64_t(checksums->shape(1)) != chosen.arrays - 1))
        throw nb::value_error("the checksums do not fit the table");
    uint32_t* const sums = checksums ? checksums->data() : nullptr;
    std::optional<WithoutGil> released;
    std::exception_ptr failed;
    auto begun = [&] {
        try {
            if (!meanwhile.is_none() && !without_gil::must_not_ask()) {
                const without_gil::Passing passing;  // it may let the GIL go
                meanwhile();
            }
        } catch (...) {
            failed = std::current_exception();  // what is under way is first done
        }
        released.emplace();
    };
    if (sums != nullptr)
        sweep_with_checksums(chosen, table, crc32c_of(kernel_at(kernel)), sums, begun);
    else sweep(chosen, table, begun);
    released.reset();
    if (failed) std::rethrow_exception(failed);
}

// See [Note: Asked in C] in memory.py. A question takes a handle, gives a number and returns 0.
static bool answers_are(const Numbers& questions, const Numbers& handles, const Rows& expected) {
    using Question = int32_t (*)(const void* handle, int64_t* answer);
    if (expected.shape(0) != handles.size() || expected.shape(1) != questions.size())
        throw nb::value_error("an answer is expected to each question about each handle");
    const int64_t* wanted = expected.data();
    for (size_t i = 0; i < handles.size(); i++) {
        for (size_t k = 0; k < questions.size(); k++) {
            int64_t answer = 0;
            const auto question = reinterpret_cast<Question>(questions.data()[k]);
            if (question(handles.data() + i, &answer) != 0 || answer != *wanted++) return false;
        }
    }
    return true;
}

static double squares(int kernel, int gradient, uintptr_t address, int64_t elements) {
    const Kernel& chosen = kernel_at(kernel);
    if (gradient < 0 || gradient >= GRADIENTS || elements < 0)
        throw nb::index_error("no such gradient");
    if (elements > 0 && address == 0) throw nb::value_error("a gradient has no memory");
    const WithoutGil released;
    return sum_of_squares(chosen, Gradient(gradient), reinterpret_cast<const Byte*>(address),
                          elements);
}

static uint32_t crc32c(int kernel, const Bytes& bytes, uint32_t value, bool threads) {
    const Crc32c function = crc32c_of(kernel_at(kernel));
    const Byte* data = bytes.data();
    const int64_t count = int64_t(bytes.size());
    if (count <= CRC_UNDER_GIL_BYTES) return function(value, data, count);
    const WithoutGil released;
    return threads ? crc32c_by_threads(function, value, data, count) : function(value, data, count);
}

static void configure(const std::vector<std::pair<int, std::vector<int>>>& places) {
    std::vector<Place> wanted;
    for (const auto& [node, processors] : places) wanted.push_back({node, processors});
    if (wanted.empty()) throw nb::value_error("no thread");
    const WithoutGil released;
    Pool::get().configure(std::move(wanted));
}

NB_MODULE(_kernels, m) {
    m.attr("VERSION") = 1;  // as cpu_adam/choice.py has it
    nb::list operations;
    for (const char* name : OPERATIONS) operations.append(name);
    m.attr("OPERATIONS") = nb::tuple(operations);
    m.attr("FACTORS") = FACTORS;
    m.attr("ADDRESS_COLUMNS") = ADDRESS_COLUMNS;
    m.attr("GROUP_ELEMENTS") = GROUP_ELEMENTS;
    m.attr("SUM_BLOCK_ELEMENTS") = SUM_BLOCK_ELEMENTS;
    m.def("kernel_names", &kernel_names);
    m.def("run", &run, nb::arg("kernel"), nb::arg("operation"), nb::arg("gradient"),
          nb::arg("rows"), nb::arg("factors"), nb::arg("checksums").none(),
          nb::arg("meanwhile") = nb::none());
    m.def("answers_are", &answers_are, nb::arg("questions"), nb::arg("handles"),
          nb::arg("expected"));
    m.def("sum_of_squares", &squares, nb::arg("kernel"), nb::arg("gradient"), nb::arg("address"),
          nb::arg("elements"));
    m.def("crc32c", &crc32c, nb::arg("kernel"), nb::arg("bytes"), nb::arg("value"),
          nb::arg("threads"));
    m.def("crc32c_combine", &crc32c_combine, nb::arg("a"), nb::arg("b"), nb::arg("bytes_of_b"));
    m.def("configure", &configure, nb::arg("places"));
    m.def("threads", [] { return Pool::get().threads(); });
    without_gil::prepare_for_the_end();
}
