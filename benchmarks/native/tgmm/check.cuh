// Every kind of weight gradient, small: all elements against the reference, twice for equal bits.
#pragma once

#include <climits>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "benchmarks/native/tgmm/reference.cuh"

namespace jaxmoe::bench {

struct TgmmCase {
  std::string name;
  std::vector<int> sizes;  // of groups, [batch, groups_per_batch]
  int num_weights;
  int batch = 1;
  int k = 328;  // ends inside a box, a tile and a cluster of tiles
  int n = 520;
  int loose_rows = 9;  // of a batch, after the last group
  bool accumulate = false;
  bool nan = false;      // rows of no group, and all those of odd weights
  bool garbage = false;  // sizes as the kernel gets them are not those that count
};

template <class Element, class Out>
class TgmmCheck {
 public:
  explicit TgmmCheck(cudaStream_t stream) : stream_(stream) {}

  // Returns whether all is right; prints a line.
  bool Run(const TgmmCase& c, const TgmmConfig& config) {
    const int groups = static_cast<int>(c.sizes.size());
    const int per_batch = groups / c.batch;
    std::vector<int> starts, sizes, given_starts, given_sizes;
    int rows = 0;  // of the longest batch
    for (int b = 0; b < c.batch; ++b) {
      int end = 0;
      for (int g = 0; g < per_batch; ++g) end += c.sizes[b * per_batch + g];
      rows = std::max(rows, end + c.loose_rows);
    }
    const int64_t total = static_cast<int64_t>(c.batch) * rows;
    std::vector<uint8_t> nan_rows(total, c.nan);
    for (int b = 0; b < c.batch; ++b) {
      int start = 0;
      for (int g = 0; g < per_batch; ++g) {
        const int size = c.sizes[b * per_batch + g];
        const bool odd = (b * per_batch + g) % c.num_weights % 2 == 1;
        for (int t = start; t < start + size; ++t) nan_rows[b * rows + t] = c.nan && odd;
        starts.push_back(b * rows + start);
        sizes.push_back(size);
        given_starts.push_back(start);
        given_sizes.push_back(size);
        start += size;
      }
    }
    if (c.garbage) {  // first: no rows. last: all rows from its start on.
      given_starts.front() = INT_MAX;
      given_sizes.front() = INT_MAX;
      sizes.front() = 0;
      given_sizes.back() = INT_MAX - 5;
      sizes.back() = rows - given_starts.back();
      given_starts[1] = INT_MIN;
      given_sizes[1] = INT_MIN;
      sizes[1] = 0;
    }
    const auto starts_d = ToDevice(starts), sizes_d = ToDevice(sizes);
    const auto given_starts_d = ToDevice(given_starts), given_sizes_d = ToDevice(given_sizes);
    const auto nan_rows_d = ToDevice(nan_rows);
    const DeviceArray<Element> x(std::max<int64_t>(total, 1) * c.k);
    const DeviceArray<Element> dy(std::max<int64_t>(total, 1) * c.n);
    FillRows<Element>(x.get(), total, c.k, 1, nan_rows_d.get(), stream_);
    FillRows<Element>(dy.get(), total, c.n, 2, nan_rows_d.get(), stream_);

    // dw between two guards, poisoned.
    const size_t count = static_cast<size_t>(c.num_weights) * c.k * c.n;
    const DeviceArray<Out> old(count);
    FillRows<Out>(old.get(), c.num_weights, static_cast<int64_t>(c.k) * c.n, 3, nullptr, stream_);
    const DeviceArray<Out> first(count + 2 * kGuard), second(count + 2 * kGuard);
    const DeviceArray<int> counter(1);
    for (const DeviceArray<Out>* out : {&first, &second}) {
      BENCH_CHECK_CUDA(cudaMemsetAsync(out->get(), 0xff, out->bytes(), stream_));
      if (c.accumulate) {
        BENCH_CHECK_CUDA(cudaMemcpyAsync(
            out->get() + kGuard, old.get(), old.bytes(), cudaMemcpyDeviceToDevice, stream_));
      }
      BENCH_CHECK_CUDA(cudaMemsetAsync(counter.get(), 0, sizeof(int), stream_));
      TgmmProblem p;
      p.dtype = std::is_same_v<Element, __half> ? DType::kFloat16 : DType::kBFloat16;
      p.x = x.get();
      p.dy = dy.get();
      p.dw = out->get() + kGuard;
      p.out_f32 = sizeof(Out) == 4;
      p.accumulate = c.accumulate;
      p.group_starts = given_starts_d.get();
      p.group_sizes = given_sizes_d.get();
      p.tile_counter = counter.get();
      p.num_weights = c.num_weights;
      p.num_groups = groups;
      p.groups_per_batch = per_batch;
      p.rows_per_batch = rows;
      p.k = c.k;
      p.n = c.n;
      BENCH_CHECK_LAUNCH(LaunchTgmm(p, config, stream_));
      BENCH_CHECK_CUDA(cudaStreamSynchronize(stream_));
    }
    TgmmReference r{x.get(),
                    dy.get(),
                    first.get() + kGuard,
                    c.accumulate ? old.get() : nullptr,
                    starts_d.get(),
                    sizes_d.get(),
                    c.num_weights,
                    groups,
                    c.k,
                    c.n};
    const TgmmErrors e = CompareWithReference<Element, Out>(r, 1, stream_);
    std::vector<uint8_t> a(first.bytes()), b(second.bytes());
    BENCH_CHECK_CUDA(cudaMemcpy(a.data(), first.get(), a.size(), cudaMemcpyDeviceToHost));
    BENCH_CHECK_CUDA(cudaMemcpy(b.data(), second.get(), b.size(), cudaMemcpyDeviceToHost));
    const bool repeats = a == b;
    bool guarded = true;
    for (size_t i = 0; i < kGuard * sizeof(Out); ++i) {
      guarded = guarded && a[i] == 0xff && a[a.size() - 1 - i] == 0xff;
    }
    const bool right = e.worst <= 1.0 && e.not_finite == 0 && e.not_zero == 0 && repeats && guarded;
    std::printf("%-5s %-34s %s%s%s cluster %d: rel %.1e worst %.2f%s%s%s%s\n",
                right ? "ok" : "WRONG",
                c.name.c_str(),
                std::is_same_v<Element, __half> ? "fp16" : "bf16",
                sizeof(Out) == 4 ? " f32" : "    ",
                c.accumulate ? " +=" : "   ",
                config.cluster,
                std::sqrt(e.error / std::max(e.reference, 1e-300)),
                e.worst,
                e.not_finite ? " NaN" : "",
                e.not_zero ? " not zero" : "",
                repeats ? "" : " differs when repeated",
                guarded ? "" : " wrote out of bounds");
    return right;
  }

 private:
  static constexpr size_t kGuard = 4096;

  cudaStream_t stream_;
};

inline std::vector<TgmmCase> TgmmCases() {
  // Around every slice, step and pipeline; empty groups at both ends and in between.
  const std::vector<int> sizes = {
      0, 1, 7, 16, 17, 0, 0, 31, 64, 65, 96, 100, 127, 128, 129, 257, 400, 0};
  const int e = static_cast<int>(sizes.size());
  return {
      {.name = "sizes", .sizes = sizes, .num_weights = e},
      {.name = "NaN outside", .sizes = sizes, .num_weights = e, .nan = true},
      {.name = "accumulate", .sizes = sizes, .num_weights = e, .accumulate = true},
      {.name = "no loose rows", .sizes = sizes, .num_weights = e, .loose_rows = 0},
      {.name = "one expert", .sizes = {1500}, .num_weights = 1},
      {.name = "one row", .sizes = {1}, .num_weights = 1, .k = 8, .n = 8, .loose_rows = 0},
      {.name = "narrow", .sizes = sizes, .num_weights = e, .k = 8, .n = 264},
      {.name = "flat", .sizes = sizes, .num_weights = e, .k = 1032, .n = 8},
      {.name = "whole tiles", .sizes = {256, 320, 192}, .num_weights = 3, .k = 512, .n = 768},
      {.name = "panels", .sizes = {70, 0, 200}, .num_weights = 3, .k = 4616, .n = 4616},
      {.name = "batches, weights of their own",
       .sizes = {3, 70, 0, 129, 64, 20},
       .num_weights = 6,
       .batch = 2},
      {.name = "batches, shared weights",
       .sizes = {3, 70, 0, 129, 64, 0, 200, 1, 0},
       .num_weights = 3,
       .batch = 3,
       .nan = true},
      {.name = "several groups a weight",
       .sizes = {3, 70, 0, 129, 0, 0, 64, 20, 1, 5, 0, 90},
       .num_weights = 4},
      {.name = "garbage", .sizes = {30, 20, 100, 50}, .num_weights = 4, .garbage = true},
      {.name = "no rows", .sizes = {0, 0}, .num_weights = 2, .loose_rows = 0},
  };
}

inline bool CheckTgmm(cudaStream_t stream) {
  int wrong = 0, all = 0;
  for (int cluster : {1, 2}) {
    TgmmConfig config;
    config.cluster = cluster;
    for (const TgmmCase& c : TgmmCases()) {
      for (int kind = 0; kind < 4; ++kind) {
        bool right = false;
        if (kind == 0) right = TgmmCheck<__nv_bfloat16, __nv_bfloat16>(stream).Run(c, config);
        if (kind == 1) right = TgmmCheck<__nv_bfloat16, float>(stream).Run(c, config);
        if (kind == 2) right = TgmmCheck<__half, __half>(stream).Run(c, config);
        if (kind == 3) right = TgmmCheck<__half, float>(stream).Run(c, config);
        ++all;
        wrong += !right;
      }
    }
  }
  std::printf("# %d of %d checks wrong\n", wrong, all);
  return wrong == 0;
}

}  // namespace jaxmoe::bench
