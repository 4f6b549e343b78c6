#include "faults.h"

#include <algorithm>
#include <random>
#include <system_error>
#include <unordered_map>
#include <utility>

namespace aio {

namespace {

constexpr int64_t BLOCK_BYTES = 4096;  // parts of an O_DIRECT transfer must be whole blocks

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

    void quiesce() override { inner_->quiesce(); }
    void wake() override { inner_->wake(); }
    void forget(int fd) override { inner_->forget(fd); }
    int register_buffer(std::byte* data, int64_t bytes) override {
        return inner_->register_buffer(data, bytes);
    }
    void unregister_buffer(std::byte* data, int64_t bytes) override {
        inner_->unregister_buffer(data, bytes);
    }
    int64_t cpu_ns() override { return inner_->cpu_ns(); }

private:
    struct Cut {
        int64_t bytes, told;  // of the whole piece, and to be reported at most
    };

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

}  // namespace

std::unique_ptr<Queue> with_faults(std::unique_ptr<Queue> inner, const Faults& faults) {
    if (!faults.any()) return inner;
    return std::make_unique<FaultQueue>(std::move(inner), faults);
}

}  // namespace aio
