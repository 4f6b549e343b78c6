#include "work.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace books {

using namespace cpu_adam;

constexpr double CLIP_EPS = 1e-6;  // as optim/update.py has it

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
        for (auto [index, level, sum] : part) {  // As `push` of cpu_adam/reference.py.
            for (; index % 2 && !nodes.empty() && std::get<1>(nodes.back()) == level; index /= 2) {
                sum = std::get<2>(nodes.back()) + sum;
                nodes.pop_back(), level++;
            }
            nodes.emplace_back(index, level, sum);
        }
    }
    add_parameter();
    norm = std::sqrt(all);
    const double ratio = max_norm / (norm + CLIP_EPS);
    factor = ratio >= 1.0 ? 1.0 : ratio;  // What is not a number stays that.
}

void Several::run(int slot, const Settings* settings) const {
    for (const WorkPtr& work : works_) work->run(slot, settings);
}

Copies::Copies(std::vector<Copy> copies, bool on_device)
    : copies_(std::move(copies)), on_device_(on_device) {
    for (const Copy& one : copies_) bytes_ += one.bytes;
}

void Copies::run(int slot, const Settings*) const {
    for (const Copy& one : copies_) std::memcpy(one.into.at(slot), one.source.at(slot), one.bytes);
}

Sweep::Sweep(const Action& action, std::vector<int64_t> rows, std::vector<int64_t> strides)
    : action_(action), rows_(std::move(rows)), strides_(std::move(strides)),
      columns_(ADDRESS_COLUMNS + action.arrays) {
    if (action.call == nullptr || rows_.size() % size_t(columns_) != 0 ||
        strides_.size() != size_t(action.arrays))
        throw std::logic_error("the table does not fit the operation");
    for (size_t at = 0; at < rows_.size(); at += size_t(columns_))
        factors_ = std::max(factors_, rows_[at + FACTORS_COLUMN] + 1);
}

void Sweep::run(int slot, const Settings* settings) const {
    static const std::vector<float> NONE(FACTORS);
    std::vector<float> factors = settings == nullptr ? NONE : settings->factors;
    if (int64_t(factors.size()) < factors_ * FACTORS)
        throw std::logic_error("a step has too few factors");
    if (settings != nullptr && settings->clip != nullptr)
        for (size_t at = 0; at < factors.size(); at += FACTORS)
            factors[at] *= float(settings->clip->factor);  // Of which it was 1 or -1.
    std::vector<int64_t> moved;
    if (slot != 0) {
        moved = rows_;
        for (size_t row = 0; row < moved.size(); row += size_t(columns_))
            for (size_t array = 0; array < strides_.size(); array++)
                moved[row + ADDRESS_COLUMNS + array] += slot * strides_[array];
    }
    const std::vector<int64_t>& rows = slot != 0 ? moved : rows_;
    sweep(action_, {rows.data(), int64_t(rows.size()) / columns_, columns_, factors.data()});
}

void Squares::run(int slot, const Settings* settings) const {
    for (const auto& [leaf, first, at, elements] : all_)
        settings->clip->put(leaf, square_sums(kernel_, dtype_, at.at(slot), elements, first));
}

}  // namespace books
