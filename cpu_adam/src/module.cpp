// What Python sees of the kernels: addresses and sizes in, nothing kept.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
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

static void run(int kernel, int operation, int gradient, const Rows& rows,
                const Factors& factors) {
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
    const WithoutGil released;
    sweep(chosen, table);
}

static Nodes squares(int kernel, int gradient, uintptr_t address, int64_t elements,
                     int64_t first) {
    const Kernel& chosen = kernel_at(kernel);
    if (gradient < 0 || gradient >= GRADIENTS || elements < 0 || first < 0)
        throw nb::index_error("no such gradient");
    if (elements > 0 && address == 0) throw nb::value_error("a gradient has no memory");
    const WithoutGil released;
    return square_sums(chosen, Gradient(gradient), reinterpret_cast<const Byte*>(address), elements,
                       first);
}

static uint32_t crc32c(int kernel, const Bytes& bytes, uint32_t value) {
    const Crc32c function = crc32c_of(kernel_at(kernel));
    const Byte* data = bytes.data();
    const int64_t count = int64_t(bytes.size());
    if (count <= CRC_UNDER_GIL_BYTES) return function(value, data, count);
    const WithoutGil released;
    return function(value, data, count);
}

static void configure(int threads) {
    if (threads < 1) throw nb::value_error("no thread");
    const WithoutGil released;
    Pool::get().configure(threads);
}

NB_MODULE(_kernels, m) {
    m.attr("VERSION") = 4;  // as cpu_adam/choice.py has it
    nb::list operations;
    for (const char* name : OPERATIONS) operations.append(name);
    m.attr("OPERATIONS") = nb::tuple(operations);
    m.attr("FACTORS") = FACTORS;
    m.attr("ADDRESS_COLUMNS") = ADDRESS_COLUMNS;
    m.attr("GROUP_ELEMENTS") = GROUP_ELEMENTS;
    m.attr("SUM_BLOCK_ELEMENTS") = SUM_BLOCK_ELEMENTS;
    m.def("kernel_names", &kernel_names);
    m.def("run", &run, nb::arg("kernel"), nb::arg("operation"), nb::arg("gradient"),
          nb::arg("rows"), nb::arg("factors"));
    m.def("square_sums", &squares, nb::arg("kernel"), nb::arg("gradient"), nb::arg("address"),
          nb::arg("elements"), nb::arg("first"));
    m.def("crc32c", &crc32c, nb::arg("kernel"), nb::arg("bytes"), nb::arg("value"));
    m.def("configure", &configure, nb::arg("threads"));
    m.def("threads", [] { return Pool::get().threads(); });
    m.def("pool", [] { return uintptr_t(&Pool::get()); });
    without_gil::prepare_for_the_end();
}
