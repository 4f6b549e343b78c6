// A queue that fails on purpose: the same faults for the same numbers and seed.
#pragma once

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <random>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "queue.h"

namespace aio {

struct Faults {
    std::map<int64_t, int> errors = {};  // errno by number of the piece submitted, from 1
    uint64_t seed = 0;                   // of what follows: shares of the pieces
    double short_rate = 0;               // that move a part only
    double retry_rate = 0;               // that fail with EINTR or EAGAIN
    double refusal_rate = 0;             // before which the queue says that it has no room
    int64_t broken_at = 0;               // number of the piece after which the queue itself fails
};

// `inner` with faults put in; a piece that fails never reaches it.
class FaultQueue final : public Queue {
public:
    FaultQueue(std::unique_ptr<Queue> inner, Faults faults)
        : inner_(std::move(inner)), faults_(std::move(faults)), random_(faults_.seed) {}

    size_t submit(std::span<Piece* const> pieces) override {
        size_t taken = 0;
        for (Piece* piece : pieces) {
            if (happens(faults_.refusal_rate)) break;
            if (!submit(*piece)) break;
            taken++;
        }
        return taken;
    }

    bool reap(std::vector<Completion>& out, int64_t wait_ns) override {
        if (faults_.broken_at > 0 && number_ >= faults_.broken_at)
            throw std::system_error(EBADF, std::generic_category(), "reap");
        const bool made = !made_.empty();
        out.insert(out.end(), made_.begin(), made_.end());
        made_.clear();
        const size_t first = out.size();
        const bool woken = inner_->reap(out, made ? 0 : wait_ns);
        for (size_t i = first; i < out.size(); i++) {
            const auto cut = cuts_.find(out[i].piece);
            if (cut == cuts_.end()) continue;
            out[i].piece->bytes = cut->second.bytes;
            out[i].result = std::min(out[i].result, cut->second.told);
            cuts_.erase(cut);
        }
        return woken;
    }

    void wake() override { inner_->wake(); }

private:
    struct Cut {
        int64_t bytes, told;  // of the whole piece, and to be reported at most
    };

    static constexpr int64_t BLOCK_BYTES = 4096;  // parts of an O_DIRECT transfer must be whole

    bool happens(double rate) {
        return rate > 0 && std::uniform_real_distribution<>()(random_) < rate;
    }

    bool submit(Piece& piece) {
        Piece* const one[] = {&piece};
        const auto error = faults_.errors.find(++number_);
        if (error != faults_.errors.end()) {
            made_.push_back({&piece, -error->second});
            return true;
        }
        if (happens(faults_.retry_rate)) {
            made_.push_back({&piece, number_ % 2 ? -EINTR : -EAGAIN});
            return true;
        }
        if (piece.bytes > 1 && happens(faults_.short_rate)) {
            std::uniform_int_distribution<int64_t> choice(1, piece.bytes - 1);
            const int64_t told = choice(random_);
            const int64_t blocks = (told + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
            cuts_[&piece] = {piece.bytes, told};
            piece.bytes = std::min(piece.bytes, blocks);
        }
        if (inner_->submit(one) == 1) return true;
        if (const auto cut = cuts_.find(&piece); cut != cuts_.end()) {
            piece.bytes = cut->second.bytes;
            cuts_.erase(cut);
        }
        number_--;
        return false;
    }

    std::unique_ptr<Queue> inner_;
    const Faults faults_;
    std::mt19937_64 random_;
    int64_t number_ = 0;
    std::vector<Completion> made_;
    std::unordered_map<Piece*, Cut> cuts_;
};

// For the option `wrap` of an engine.
inline auto with_faults(Faults faults) {
    return [faults = std::move(faults)](std::unique_ptr<Queue> inner) -> std::unique_ptr<Queue> {
        return std::make_unique<FaultQueue>(std::move(inner), faults);
    };
}

}  // namespace aio
