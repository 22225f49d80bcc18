// Times single grouped GEMMs and the fused layer on one GPU, without JAX.
//
// A burst is a pause, one untimed call and n timed ones between two events; a time is the median of
// the bursts, a call. Every call has the next routing and the next set of weights. Layers run in a
// CUDA graph, as under XLA; single products are launched one by one, each with a zeroed tile
// counter of its own. See benchmarks/README.md.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/native/check.cuh"
#include "benchmarks/native/options.h"
#include "benchmarks/native/workload.cuh"

namespace jaxmoe::bench {
namespace {

// What an H200 reaches, CEILINGS in benchmarks/bounds.py. Elsewhere they only size the bursts.
constexpr double kBytesPerUs = 4.3e6;
constexpr double kFlopsPerUs = 780e6;

constexpr int kRounds = 5;
constexpr int kMaxCalls = 256;  // of a burst: a launch queue holds 1024

// What an op must do at least.
struct Work {
  double flops;
  double weight_bytes;
  double activation_bytes;

  double MemoryUs() const { return (weight_bytes + activation_bytes) / kBytesPerUs; }
  double FloorUs() const { return std::max(MemoryUs(), flops / kFlopsPerUs); }
  // Enough arithmetic to meet the power cap.
  bool ComputeHeavy() const { return flops / kFlopsPerUs >= 0.5 * MemoryUs(); }
};

Work WorkOf(Op op, const Workload& load) {
  const double hidden = load.model().hidden, intermediate = load.model().intermediate;
  const double tokens = load.num_tokens(), rows = load.num_rows();
  const double flops = 2.0 * rows * hidden * intermediate;  // of one matrix
  const double bytes = load.experts_hit() * hidden * intermediate * sizeof(bf16);
  switch (op) {
    case Op::kGemm1:
      return {2 * flops, 2 * bytes, (tokens * hidden + rows * intermediate) * sizeof(bf16)};
    case Op::kGemm2:
      return {flops, bytes, rows * (intermediate + hidden) * sizeof(bf16)};
    case Op::kLayer:
      break;
  }
  return {3 * flops, 3 * bytes, 2 * tokens * hidden * sizeof(bf16)};
}

// Every tile that has a kernel but those of up to 32 tokens where the experts hit have more than 4
// times as many rows in the mean (each weight would be read more than 4 times), and the wider ones
// where they have fewer than 4; for gemm1 and the layer with gather and without. Raster 8 is tried
// beside 1 from 2048 rows an expert on, as jaxmoe/_gemm/tiles.py has it.
std::vector<TileConfig> TilesThatMakeSense(WeightLayout layout, const Workload& load) {
  const double mean_rows = load.num_rows() / load.experts_hit();
  std::vector<TileConfig> tiles;
  for (TileConfig tile : InstantiatedTiles(layout)) {
    if (tile.token_tile <= 32 ? mean_rows > 4 * tile.token_tile : mean_rows < 4) continue;
    for (bool gather : {false, true}) {
      for (int raster : {1, 8}) {
        if (raster == 8 && mean_rows < 2048) continue;
        tile.gather = gather;
        tile.raster = raster;
        tiles.push_back(tile);
      }
    }
  }
  return tiles;
}

std::vector<TileConfig> TilesToTry(const Options& options, Op op, const Workload& load) {
  const std::vector<TileConfig> candidates =
      options.tiles.empty() ? TilesThatMakeSense(options.layout, load) : options.tiles;
  std::vector<TileConfig> tiles;
  for (TileConfig tile : candidates) {
    if (op == Op::kGemm2) tile.gather = false;  // its rows are in order
    const auto same = [&](const TileConfig& other) { return Name(other) == Name(tile); };
    if (std::none_of(tiles.begin(), tiles.end(), same)) tiles.push_back(tile);
  }
  return tiles;
}

// A zero int for each launch, cleared when all were used.
class TileCounters {
 public:
  explicit TileCounters(cudaStream_t stream) : counters_(65536), stream_(stream) { Clear(); }

  void Clear() {
    next_ = 0;
    BENCH_CHECK_CUDA(cudaMemsetAsync(counters_.get(), 0, counters_.bytes(), stream_));
  }
  int* Next() {
    if (next_ == counters_.count()) Clear();
    return counters_.get() + next_++;
  }

 private:
  DeviceArray<int> counters_;
  cudaStream_t stream_;
  size_t next_ = 0;
};

struct Timing {
  double us;          // of a call
  double enqueue_us;  // host time of a call
};

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    BENCH_CHECK_CUDA(cudaEventCreate(&begin_));
    BENCH_CHECK_CUDA(cudaEventCreate(&end_));
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    BENCH_CHECK_CUDA(cudaEventDestroy(begin_));
    BENCH_CHECK_CUDA(cudaEventDestroy(end_));
  }

  template <class Call>
  Timing Median(Call call, int calls, int idle_us, int rounds) const {
    std::vector<Timing> timings;
    for (int round = 0; round < rounds; ++round) {
      BENCH_CHECK_CUDA(cudaStreamSynchronize(stream_));
      usleep(idle_us);
      call();
      BENCH_CHECK_CUDA(cudaEventRecord(begin_, stream_));
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) call();
      const std::chrono::duration<double, std::micro> enqueue =
          std::chrono::steady_clock::now() - start;
      BENCH_CHECK_CUDA(cudaEventRecord(end_, stream_));
      BENCH_CHECK_CUDA(cudaStreamSynchronize(stream_));
      float ms = 0;
      BENCH_CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      timings.push_back({ms * 1000.0 / calls, enqueue.count() / calls});
    }
    std::sort(timings.begin(), timings.end(), [](const Timing& a, const Timing& b) {
      return a.us < b.us;
    });
    return timings[timings.size() / 2];
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_;
  cudaEvent_t end_;
};

// `count` calls captured in a CUDA graph.
class Graph {
 public:
  template <class Call>
  Graph(Call call, int count, cudaStream_t stream) : stream_(stream) {
    cudaGraph_t graph;
    BENCH_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) call();
    BENCH_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    BENCH_CHECK_CUDA(cudaGraphInstantiate(&executable_, graph, 0));
    BENCH_CHECK_CUDA(cudaGraphDestroy(graph));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { BENCH_CHECK_CUDA(cudaGraphExecDestroy(executable_)); }

  void Launch() const { BENCH_CHECK_CUDA(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_;
};

// Measures one op of one workload after the other, a printed line each.
class Bench {
 public:
  Bench(const Options& options, bool known_floor, cudaStream_t stream)
      : options_(options),
        known_floor_(known_floor),
        stream_(stream),
        counters_(stream),
        timer_(stream) {}

  void PrintColumns() const {
    std::printf("%-14s %6s %-6s %-24s %9s %8s %6s %6s",
                "model",
                "tokens",
                "what",
                "tile",
                "us",
                "TFLOP/s",
                "TB/s",
                "floor");
    if (options_.sustained_ms > 0) std::printf(" %9s %8s", "sust. us", "TFLOP/s");
    if (options_.check) std::printf(" %8s", "rel_err");
    std::printf("\n");
  }

  // Returns false if a checked product was wrong; it is then not timed.
  bool Measure(const Workload& load, Op op, const TileConfig& tile) {
    std::printf("%-14s %6d %-6s %-24s ",
                load.model().name,
                load.num_tokens(),
                Name(op),
                Name(tile).c_str());
    double error = 0.0;
    if (options_.check) {
      error = Error(load, op, tile);
      if (!(error <= kMaxRelativeError)) {  // or NaN
        std::printf("rel_err %.1e WRONG\n", error);
        return false;
      }
    }
    const Work work = WorkOf(op, load);
    const bool heavy = work.ComputeHeavy();
    Prepare(load, op, tile);
    int turn = 0;
    bool host_bound;
    const auto launch = [&] { Launch(load, op, tile, turn++); };
    if (op == Op::kLayer) {
      const int layers = std::clamp(static_cast<int>((heavy ? 12e3 : 50e3) / work.FloorUs()), 1, 8);
      const Graph graph(launch, layers, stream_);
      host_bound = Time(work, [&] { graph.Launch(); }, layers);
    } else {
      host_bound = Time(work, launch, 1);
    }
    if (options_.check) std::printf(" %8.1e", error);
    std::printf("%s\n", host_bound ? "  host-bound" : "");
    return true;
  }

 private:
  // Input of the product on its own; of the layer nothing is needed.
  void Prepare(const Workload& load, Op op, const TileConfig& tile) {
    if (op == Op::kGemm1 && !tile.gather) load.PermuteTokens();
    if (op == Op::kGemm2) FillNormal(load.act(), 0.5f, 79, stream_);
    counters_.Clear();
    BENCH_CHECK_CUDA(cudaStreamSynchronize(stream_));
  }

  void Launch(const Workload& load, Op op, const TileConfig& tile, int turn) {
    if (op == Op::kLayer) {
      const TileConfig& down = options_.down.empty() ? tile : options_.down.front();
      BENCH_CHECK_LAUNCH(LaunchMoeMlp(load.Layer(tile, down, turn), stream_));
    } else if (op == Op::kGemm1) {
      const MoeGemmProblem gemm = load.GateUp(tile.gather, turn, counters_.Next());
      BENCH_CHECK_LAUNCH(LaunchMoeGemm(gemm, tile, stream_));
    } else {
      BENCH_CHECK_LAUNCH(LaunchMoeGemm(load.Down(turn, counters_.Next()), tile, stream_));
    }
  }

  // The larger error of the products the op has, over buffers of huge values.
  double Error(const Workload& load, Op op, const TileConfig& tile) {
    const auto poison = [&](const DeviceArray<bf16>& out) {
      BENCH_CHECK_CUDA(cudaMemsetAsync(out.get(), 0x7f, out.bytes(), stream_));
    };
    if (op != Op::kGemm1) poison(load.rows());
    if (op != Op::kGemm2) poison(load.act());
    Prepare(load, op, tile);
    Launch(load, op, tile, 0);
    BENCH_CHECK_CUDA(cudaStreamSynchronize(stream_));
    double error = 0.0;
    if (op != Op::kGemm2) error = GateUpError(load, tile.token_tile, stream_);
    // NOTE: this order of arguments keeps a NaN of the down product.
    if (op != Op::kGemm1 && error <= kMaxRelativeError) {
      error = std::max(DownError(load, tile.token_tile, stream_), error);
    }
    return error;
  }

  // Prints the columns of times; `call` does the work `repeats` times. Returns whether enqueueing a
  // burst took about as long as running it.
  template <class Call>
  bool Time(const Work& work, Call call, int repeats) {
    const bool heavy = work.ComputeHeavy();
    const double call_us = work.FloorUs() * repeats;
    const int calls = std::clamp(static_cast<int>((heavy ? 25e3 : 10e3) / call_us), 1, kMaxCalls);
    const Timing burst = timer_.Median(call, calls, heavy ? 40000 : 5000, kRounds);
    const double us = burst.us / repeats;
    std::printf("%9.1f %8.1f %6.2f", us, work.flops / us * 1e-6, work.weight_bytes / us * 1e-6);
    if (known_floor_) {
      std::printf(" %5.1f%%", 100.0 * work.FloorUs() / us);
    } else {
      std::printf(" %6s", "-");
    }
    if (options_.sustained_ms > 0) {
      const int enough = std::max(1, static_cast<int>(options_.sustained_ms * 1e3 / burst.us));
      const double sustained_us = timer_.Median(call, enough, 0, 1).us / repeats;
      std::printf(" %9.1f %8.1f", sustained_us, work.flops / sustained_us * 1e-6);
    }
    return burst.enqueue_us >= 0.9 * burst.us;
  }

  const Options& options_;
  bool known_floor_;
  cudaStream_t stream_;
  TileCounters counters_;
  Timer timer_;
};

// Returns the name of the device, which must be a Hopper.
std::string RequireHopper() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    throw std::runtime_error(std::string("no CUDA device: ") +
                             (status == cudaSuccess ? "none found" : cudaGetErrorString(status)));
  }
  cudaDeviceProp device;
  BENCH_CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  if (device.major != 9 || device.minor != 0) {
    throw std::runtime_error("the kernels need compute capability 9.0 (Hopper); " +
                             std::string(device.name) + " has " + std::to_string(device.major) +
                             "." + std::to_string(device.minor));
  }
  return device.name;
}

bool Run(const Options& options) {
  const std::string device = RequireHopper();
  const bool known_floor = device == "NVIDIA H200";
  std::printf("# %s, bf16, weights %s, %s routing; floor: %s\n",
              device.c_str(),
              Name(options.layout),
              Name(options.skew),
              known_floor ? "4.3 TB/s, 780 TFLOP/s" : "none for this device");
  cudaStream_t stream;
  BENCH_CHECK_CUDA(cudaStreamCreate(&stream));
  bool right = true;
  {
    Bench bench(options, known_floor, stream);
    bench.PrintColumns();
    for (const Model& model : options.models) {
      const WeightSets weights(model, options.layout, stream);
      for (int tokens : options.tokens) {
        const Workload load(weights, tokens, options.skew, stream);
        std::printf("# %s, %d tokens: %.1f of %d experts hit, %d weight sets\n",
                    model.name,
                    tokens,
                    load.experts_hit(),
                    model.num_experts,
                    weights.size());
        for (Op op : options.ops) {
          for (const TileConfig& tile : TilesToTry(options, op, load)) {
            right = bench.Measure(load, op, tile) && right;
          }
        }
      }
    }
  }
  BENCH_CHECK_CUDA(cudaStreamDestroy(stream));
  return right;
}

}  // namespace
}  // namespace jaxmoe::bench

int main(int argc, char** argv) {
  namespace bench = jaxmoe::bench;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a line as soon as it is measured
  try {
    const bench::Options options = bench::ParseOptions(argc, argv);
    if (options.help) {
      std::fputs(bench::kUsage, stdout);
      return 0;
    }
    return bench::Run(options) ? 0 : 1;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "gemm_bench: %s\n", error.what());
    return 2;
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "gemm_bench: %s\n", error.what());
    return 1;
  }
}
