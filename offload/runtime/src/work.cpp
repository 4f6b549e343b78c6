#include "work.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../../cpu_adam/src/device/table.cuh"

namespace runner {

using namespace cpu_adam;

constexpr double CLIP_EPS = 1e-6;  // as reference.py has it
constexpr int64_t GRID_COLUMNS_MOST = 4096;
constexpr unsigned BLOCK_THREADS = 256;

// The next node of a parameter's tree: as `push` of cpu_adam/reference.py.
static void push(Nodes& nodes, int64_t index, int level, double sum) {
    for (; index % 2 && !nodes.empty() && std::get<1>(nodes.back()) == level; index /= 2) {
        sum = std::get<2>(nodes.back()) + sum;
        nodes.pop_back(), level++;
    }
    nodes.emplace_back(index, level, sum);
}

void Clip::combine() {
    double all = 0;
    Nodes nodes;  // of a parameter
    auto add_parameter = [&] {
        double total = 0;
        for (; !nodes.empty(); nodes.pop_back()) total = std::get<2>(nodes.back()) + total;
        all += total;
    };
    for (const auto& [leaf, part] : parts) {
        if (std::get<0>(part.front()) == 0) add_parameter();
        for (const auto& [index, level, sum] : part) push(nodes, index, level, sum);
    }
    add_parameter();
    norm = std::sqrt(all);
    const double ratio = max_norm / (norm + CLIP_EPS);
    factor = ratio >= 1.0 ? 1.0 : ratio;  // What is not a number stays that.
}

std::vector<float> Settings::scaled(int64_t rows) const {
    if (int64_t(factors.size()) < rows * FACTORS)
        throw std::logic_error("a step has too few factors");
    std::vector<float> found = factors;
    if (clip != nullptr)
        for (size_t at = 0; at < found.size(); at += FACTORS)
            found[at] *= float(clip->factor);  // Of which it was 1 or -1.
    return found;
}

void Several::run(int slot, const Settings* settings) const {
    for (const WorkPtr& work : works_) work->run(slot, settings);
}

After Several::queue(driver::Driver& device, driver::Stream stream, int slot,
                     const Settings* settings) const {
    std::vector<After> ends;
    for (const WorkPtr& work : works_)
        if (After end = work->queue(device, stream, slot, settings)) ends.push_back(std::move(end));
    if (ends.empty()) return {};
    return [ends = std::move(ends)] {
        for (const After& end : ends) end();
    };
}

// -- copies ---------------------------------------------------------------------------------------

Copies::Copies(std::vector<Copy> copies, bool on_device)
    : copies_(std::move(copies)), on_device_(on_device) {
    for (const Copy& one : copies_) bytes_ += one.bytes;
}

void Copies::run(int slot, const Settings*) const {
    for (const Copy& one : copies_) std::memcpy(one.into.at(slot), one.source.at(slot), one.bytes);
}

After Copies::queue(driver::Driver& device, driver::Stream stream, int slot,
                    const Settings*) const {
    for (const Copy& one : copies_)
        device.copy(one.into.at(slot), one.source.at(slot), one.bytes, stream);
    return {};
}

// -- updates --------------------------------------------------------------------------------------

Rows::Rows(std::vector<int64_t> given, std::vector<int64_t> by_array)
    : rows(std::move(given)), strides(std::move(by_array)),
      columns(ADDRESS_COLUMNS + int64_t(strides.size())) {
    for (size_t at = 0; at < rows.size(); at += size_t(columns))
        factors = std::max(factors, rows[at + FACTORS_COLUMN] + 1);
}

std::vector<int64_t> Rows::at(int slot) const {
    std::vector<int64_t> moved = rows;
    for (size_t row = 0; slot != 0 && row < moved.size(); row += size_t(columns))
        for (size_t array = 0; array < strides.size(); array++)
            moved[row + ADDRESS_COLUMNS + array] += slot * strides[array];
    return moved;
}

static const Settings NONE{std::vector<float>(FACTORS), nullptr};

void Sweep::run(int slot, const Settings* settings) const {
    const auto factors = (settings != nullptr ? *settings : NONE).scaled(rows_.factors);
    const std::vector<int64_t> moved = slot != 0 ? rows_.at(slot) : std::vector<int64_t>();
    const std::vector<int64_t>& rows = slot != 0 ? moved : rows_.rows;
    sweep(action_, {rows.data(), int64_t(rows.size()) / rows_.columns, rows_.columns,
                    factors.data()});
}

// Queue a kernel for some rows of a table, as many times as it takes.
static void launch(driver::Driver& device, driver::Stream stream, const std::string& name,
                   Gradient dtype, int64_t block_elements, const std::vector<DeviceRow>& rows) {
    for (size_t start = 0; start < rows.size(); start += DEVICE_ROWS) {
        const size_t count = std::min(rows.size() - start, size_t(DEVICE_ROWS));
        DeviceTable table{dtype, int32_t(count), {}};
        int64_t most = 1;
        for (int32_t at = 0; at < table.count; at++) {
            table.rows[at] = rows[start + size_t(at)];
            most = std::max(most, table.rows[at].elements);
        }
        const int64_t blocks = (most + block_elements - 1) / block_elements;
        device.launch(name, unsigned(std::min(blocks, GRID_COLUMNS_MOST)), unsigned(table.count),
                      BLOCK_THREADS, &table, stream);
    }
}

After DeviceSweep::queue(driver::Driver& device, driver::Stream stream, int slot,
                         const Settings* settings) const {
    const auto factors = (settings != nullptr ? *settings : NONE).scaled(rows_.factors);
    const std::vector<int64_t> table = rows_.at(slot);
    std::vector<DeviceRow> rows;
    for (auto at = table.begin(); at != table.end(); at += rows_.columns) {
        DeviceRow& row = rows.emplace_back();
        row.elements = at[ELEMENTS_COLUMN];
        row.first = at[FIRST_COLUMN];
        std::copy(at + ADDRESS_COLUMNS, at + rows_.columns, row.arrays);
        std::copy_n(factors.begin() + at[FACTORS_COLUMN] * FACTORS, FACTORS, row.factors);
    }
    launch(device, stream, name_, dtype_, block_elements_, rows);
    return {};
}

// -- sums of squares ------------------------------------------------------------------------------

void Squares::run(int slot, const Settings* settings) const {
    for (const auto& [leaf, first, at, elements] : all_)
        settings->clip->put(leaf, square_sums(kernel_, dtype_, at.at(slot), elements, first));
}

static int64_t leaves_of(const Stretch& one) {
    return (one.elements + SUM_BLOCK_ELEMENTS - 1) / SUM_BLOCK_ELEMENTS;
}

After DeviceSquares::queue(driver::Driver& device, driver::Stream stream, int slot,
                           const Settings* settings) const {
    int64_t every = 0;
    for (const Stretch& one : all_) every += leaves_of(one);
    const auto sums = std::make_shared<std::vector<double>>(every);
    double* into = sums->data();
    for (size_t next = 0; next < all_.size();) {
        std::vector<DeviceRow> rows;
        int64_t used = 0;
        for (; next < all_.size(); next++) {
            const int64_t leaves = leaves_of(all_[next]);
            if (!rows.empty() && used + leaves > scratch_leaves_) break;
            DeviceRow& row = rows.emplace_back(DeviceRow{all_[next].elements, 0, {}, {}});
            row.arrays[0] = reinterpret_cast<int64_t>(all_[next].at.at(slot));
            row.arrays[1] = reinterpret_cast<int64_t>(scratch_ + used * int64_t(sizeof(double)));
            used += leaves;
        }
        launch(device, stream, "squares_of_blocks", dtype_, block_elements_, rows);
        device.copy(into, scratch_, size_t(used) * sizeof(double), stream);
        into += used;
    }
    return [this, sums, clip = settings->clip] {
        const double* sum = sums->data();
        for (const Stretch& one : all_) {
            Nodes nodes;
            for (int64_t leaf = 0; leaf < leaves_of(one); leaf++)
                push(nodes, one.first + leaf, 0, *sum++);
            clip->put(one.leaf, nodes);
        }
    };
}

}  // namespace runner
