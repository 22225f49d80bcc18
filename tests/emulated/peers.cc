// Steps of several devices through peer memory, by the kernels of csrc/peers on a CPU's threads.
//
//   peers DEVICES STEPS SEED           random dispatches and combines, compared with what they are
//   peers DEVICES STEPS SEED leaves N  device 1 does nothing from step N on
//   peers DEVICES STEPS SEED differs N  device 1 takes another step than the others in step N
//   peers DEVICES STEPS SEED moved N   device 1 is another one of the program's mesh in step N
//   peers DEVICES STEPS SEED none N    nothing of that before step N; nobody waits long
//   peers DEVICES STEPS SEED beside    among them exchanges beside products, and nothing goes
//   wrong;
//                                      nobody waits long
//   peers DEVICES STEPS SEED ordered   so too with dispatches in the order of experts
//   peers DEVICES STEPS SEED orderless N  in that order; device 1 does nothing from step N on
//   peers DEVICES STEPS SEED spoils    as beside, but when device 1 adds the sums of the last
//   exchange
//                                      another one gives up, whose copies of the next one come
//
// Prints why each device failed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>

#include "csrc/peers/beside.cuh"
#include "csrc/peers/few.cuh"
#include "csrc/peers/ordered.cuh"

namespace jaxmoe {
namespace {

constexpr int64_t kHalfBytes = 1 << 20;
constexpr int64_t kFewBytes = 1 << 20;
constexpr int64_t kLineBytes = kFewBytes / 2;
constexpr int kLocal = 3;  // experts of a device

struct Memory {
  explicit Memory() : bytes(kPeerHeaderBytes + 2 * (kHalfBytes + kFewBytes) + 4096) {}
  char* base() {
    const auto address = reinterpret_cast<uintptr_t>(bytes.data());
    return bytes.data() + (4096 - address % 4096) % 4096;
  }
  std::vector<char> bytes;
};

// What a device has in a step, which every device can draw.
struct Given {
  std::vector<int32_t> slots;
  std::vector<float> tokens, small, rows, small_rows, residual;
};

struct Step {
  bool dispatch, few, lines, has_residual;
  int num_tokens, top_k, hidden, small_floats, ctas, chunks;
  std::vector<Given> of_device;
};

Step Draw(int devices, int seed, int number) {
  std::mt19937 random(seed * 1000003 + number);
  const auto below = [&](int limit) { return static_cast<int>(random() % limit); };
  Step step{};
  step.dispatch = below(2);
  step.few = below(2);
  step.lines = step.few && std::mt19937(seed * 104729 + number)() % 2 == 0;
  step.has_residual = below(2);
  step.num_tokens = 1 + below(4);
  step.top_k = 1 + below(3) + 32 * (below(8) == 0);
  step.hidden = step.few || below(2) ? 4 * (1 + below(300)) : 1 + below(600);
  step.small_floats = below(3) * 5;
  step.chunks = 2 + below(kPeerChunks - 1);
  step.ctas = below(2) + (step.few ? 1 : kPushGroups + 1);  // of many tokens some push, some take
  const auto floats = [&](int count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(below(1000)) - 500.0f;
    // Numbers of steps to come, where such a number would be that of a pair.
    for (int i = 1; i < count; i += 2) values[i] = __uint_as_float(number + 1 + i / 4 % 8);
    return values;
  };
  for (int device = 0; device < devices; ++device) {
    Given given;
    for (int i = 0; i < step.num_tokens * step.top_k; ++i) {
      const int32_t garbage[] = {-1, -2147483647, 2147483647, devices * kLocal};
      given.slots.push_back(below(5) == 0 ? garbage[below(4)] : below(devices * kLocal));
    }
    given.tokens = floats(step.num_tokens * step.hidden);
    given.small = floats(step.num_tokens * step.small_floats);
    given.rows = floats(devices * step.num_tokens * step.hidden);
    given.small_rows = floats(devices * step.num_tokens * step.small_floats);
    given.residual = floats(step.num_tokens * step.hidden);
    step.of_device.push_back(given);
  }
  return step;
}

bool Goes(const Step& step, int source, int token, int device) {
  for (int k = 0; k < step.top_k; ++k) {
    const int64_t slot = step.of_device[source].slots[token * step.top_k + k];
    if (slot >= 0 && slot / kLocal == device) return true;
  }
  return false;
}

// Until all other devices have come to a step, as this one's memory tells, or one gave up.
void AwaitOthers(const Peers& peers, uint32_t step) {
  const PeerHeader* own = HeaderOf(peers, peers.rank);
  for (int device = 0; device < peers.num_devices; ++device) {
    if (device == peers.rank) continue;
    const auto last = [&] {
      uint32_t step = 0;
      for (const auto& half : own->flags[device].came) {
        for (const uint64_t& came : half) {
          step = std::max(step, static_cast<uint32_t>(LoadAcquireSystem(&came)));
        }
      }
      return step;
    };
    while (last() < step && LoadAcquireSystem(&own->failed) == 0) {
      std::this_thread::yield();
    }
  }
}

// Whether a device is the slow one of a step, whose number in the memory is one more. It reads when
// the others have written what they can of the step after, and gives them a while of that before it
// writes itself: whatever may go wrong between steps does.
bool IsSlow(const Peers& peers, int number) {
  return number >= 0 && number % peers.num_devices == peers.rank;
}

// A device's part of a step, which reads when the others have come to step `read_after` where it
// can be held. Returns the number of wrong results; of failed ones those that are no
// NaN.
template <class Unit, int kSize>
int Run(const Step& step,
        const Peers& peers,
        int32_t place,
        uint32_t tag,
        uint32_t read_after,
        bool expect_failure) {
  const int n = peers.num_devices, me = peers.rank, rows = n * step.num_tokens;
  const Given& given = step.of_device[me];
  const int pushers = std::max<int>(step.ctas / 2, kPushGroups);
  const int lines = step.lines ? rows * Lines(step.hidden * 4).units / kLineUnits : 0;
  const ExchangeSize size{
      step.num_tokens, step.top_k, kLocal, n, tag, step.few, lines, 0, pushers, step.chunks};
  std::vector<int32_t> all_slots;
  for (const Given& other : step.of_device) {
    all_slots.insert(all_slots.end(), other.slots.begin(), other.slots.end());
  }
  const std::function<void()> wait = [&] {
    AwaitOthers(peers, read_after);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  const auto launch = [&](const std::function<void()>& kernel) {
    const auto* before_reading = read_after > 0 ? &wait : nullptr;
    const unsigned readers = step.few ? 0 : pushers;
    emulated::Launch(step.ctas, 64, kernel, before_reading, readers);
  };
  int wrong = 0;
  const auto compare = [&](float got, float wanted) {
    wrong += expect_failure ? got == got : !(got == wanted);
  };
  if (step.dispatch) {
    std::vector<int32_t> got_slots(rows * step.top_k);
    std::vector<float> got(rows * step.hidden), got_small(rows * step.small_floats);
    PeerDispatchParams params{&peers,
                              size,
                              &place,
                              given.slots.data(),
                              given.tokens.data(),
                              given.small.data(),
                              got_slots.data(),
                              got.data(),
                              got_small.data(),
                              step.hidden * 4,
                              step.small_floats};
    if (step.lines) {
      launch([&] { PeerFewDispatchKernel<Lines>(params); });
    } else if (step.few) {
      launch([&] { PeerFewDispatchKernel<Pairs>(params); });
    } else {
      launch([&] { PeerDispatchKernel<Unit>(params); });
    }
    for (int source = 0; source < n; ++source) {
      for (int t = 0; t < step.num_tokens; ++t) {
        const int row = source * step.num_tokens + t;
        const bool comes = Goes(step, source, t, me);
        for (int h = 0; h < step.hidden; ++h) {
          const float value = step.of_device[source].tokens[t * step.hidden + h];
          compare(got[row * step.hidden + h], comes ? value : 0.0f);
        }
        for (int i = 0; i < step.small_floats; ++i) {
          const float value = step.of_device[source].small[t * step.small_floats + i];
          compare(got_small[row * step.small_floats + i], comes ? value : 0.0f);
        }
      }
    }
    for (size_t i = 0; i < got_slots.size(); ++i) {
      wrong += got_slots[i] != (expect_failure ? -1 : all_slots[i]);
    }
    return wrong;
  }
  std::vector<float> got(step.num_tokens * step.hidden);
  std::vector<float> got_small(step.num_tokens * step.small_floats);
  PeerCombineParams params{&peers,
                           size,
                           &place,
                           given.slots.data(),
                           all_slots.data(),
                           given.rows.data(),
                           given.rows.data() + me * step.num_tokens * step.hidden,
                           step.has_residual ? given.residual.data() : nullptr,
                           given.small_rows.data(),
                           got.data(),
                           got_small.data(),
                           DType::kFloat32,
                           step.hidden,
                           step.small_floats};
  const int pieces = step.hidden / kSize;
  if (step.lines) {
    launch([&] { PeerFewCombineKernel<float, Lines, LinesReceived>(params); });
  } else if (step.few) {
    launch([&] { PeerFewCombineKernel<float, Pairs, PairsReceived>(params); });
  } else {
    launch([&] { PeerCombineKernel<float, kSize>(params, pieces); });
  }
  for (int t = 0; t < step.num_tokens; ++t) {
    for (int h = 0; h < step.hidden; ++h) {
      float sum = 0.0f;
      for (int device = 0; device < n; ++device) {
        if (!Goes(step, me, t, device)) continue;
        const int row = me * step.num_tokens + t;
        sum += step.of_device[device].rows[row * step.hidden + h];
      }
      if (step.has_residual) sum += given.residual[t * step.hidden + h];
      compare(got[t * step.hidden + h], sum);
    }
    for (int i = 0; i < step.small_floats; ++i) {
      float sum = 0.0f;
      for (int device = 0; device < n; ++device) {
        if (!Goes(step, me, t, device)) continue;
        const int row = me * step.num_tokens + t;
        sum += step.of_device[device].small_rows[row * step.small_floats + i];
      }
      compare(got_small[t * step.small_floats + i], sum);
    }
  }
  return wrong;
}

// An exchange beside products, whose products are none: rows are drawn. Memory is copied, as copy
// engines do, between its kernels, and late at times. With `spoilt` another device gives up while
// sums are read, and sends others. Returns the number of wrong results; NaN are right then.
int RunBeside(
    const Step& step, const Peers& peers, int32_t place, uint32_t tag, bool late, bool spoilt) {
  const int n = peers.num_devices, me = peers.rank, tokens = step.num_tokens;
  const Given& given = step.of_device[me];
  const int choices = tokens * step.top_k;
  const int64_t row_bytes = step.hidden * 4, bytes = tokens * row_bytes;
  std::vector<int32_t> ids(n * choices), counters(2 * n, 7);
  std::vector<uint32_t> came(n, 7);
  std::vector<float> weights(n * choices), all(n * tokens * step.hidden);
  std::vector<float> got(tokens * step.hidden);
  const auto weight_of = [](int32_t slot) { return static_cast<float>(slot % 97); };
  std::vector<float> own_weights;
  for (int32_t slot : given.slots) own_weights.push_back(weight_of(slot));
  PeerBeside params{};
  params.peers = &peers;
  params.size = {tokens, step.top_k, kLocal, n, tag};
  params.place = &place;
  params.slots = given.slots.data();
  params.weights = own_weights.data();
  params.all_ids = ids.data();
  params.all_weights = weights.data();
  params.came = came.data();
  params.counters = counters.data();
  params.arrays[0] = {reinterpret_cast<const char*>(given.tokens.data()),
                      reinterpret_cast<char*>(all.data()),
                      row_bytes};
  params.num_arrays = 1;
  params.sum.size = params.size;
  params.sum.slots = given.slots.data();
  params.sum.own = given.rows.data() + me * tokens * step.hidden;
  params.sum.residual = step.has_residual ? given.residual.data() : nullptr;
  params.sum.y = got.data();
  params.sum.dtype = DType::kFloat32;
  params.sum.hidden = step.hidden;
  const auto half = [&](int device, int parity) {
    return peers.bases[device] + kPeerHeaderBytes + parity * peers.half_bytes;
  };
  const auto wait = [&] {
    if (late) std::this_thread::sleep_for(std::chrono::milliseconds(8));
  };
  emulated::Launch(step.ctas, 64, [&] { PeerPublishKernel(params); });
  emulated::Launch(step.ctas, 64, [&] { PeerChoicesKernel(params); });
  wait();
  int wrong = 0;
  for (int turn = 0; turn < n; ++turn) {
    const int device = (me + turn) % n;
    const Given& other = step.of_device[device];
    float* to = all.data() + turn * tokens * step.hidden;
    if (turn > 0) std::memcpy(to, half(device, 1) + PlacesOf(params).arrays[0], bytes);
    for (int i = 0; i < tokens * step.hidden; ++i) wrong += to[i] != other.tokens[i];
    for (int i = 0; i < choices; ++i) {
      const int32_t slot = other.slots[i], local = slot - me * kLocal;
      const bool here = slot >= 0 && local >= 0 && local < kLocal;
      wrong += ids[turn * choices + i] != (here ? local * n + turn : -1);
      wrong += weights[turn * choices + i] != weight_of(slot);
    }
    wrong += came[turn] != (turn == 0) || counters[turn] != 0 || counters[n + turn] != 0;
  }
  wait();
  for (int turn = 1; turn < n; ++turn) {
    const int device = (me + turn) % n;
    const float* rows = given.rows.data() + device * tokens * step.hidden;
    std::memcpy(half(device, 0) + me * bytes, rows, bytes);
  }
  std::once_flag once;
  const std::function<void()> spoil = [&] {
    std::call_once(once, [&] {
      StoreReleaseSystem(&peers.own->failed, 1);
      std::memset(half(me, 0), 0, n * bytes);
    });
  };
  const auto add = [&] { PeerSumKernel<float>(params, step.hidden / 4); };
  emulated::Launch(step.ctas, 64, add, spoilt ? &spoil : nullptr, spoilt ? 1 : 0);
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < step.hidden; ++h) {
      float sum = 0.0f;
      for (int device = 0; device < n; ++device) {
        if (!Goes(step, me, t, device)) continue;
        sum += step.of_device[device].rows[(me * tokens + t) * step.hidden + h];
      }
      if (step.has_residual) sum += given.residual[t * step.hidden + h];
      const float result = got[t * step.hidden + h];
      wrong += result != sum && !(spoilt && std::isnan(result));
    }
  }
  return wrong;
}

// A dispatch in the order of experts: rows of a part are there when its word says so, and all stay
// until the step after the next. What runs beside them on another stream does so on a thread.
// One that fails ends all the same, without choices. Returns the number of wrong results.
int RunOrdered(
    const Step& step, const Peers& peers, int32_t place, uint32_t tag, bool late, bool fails) {
  const int n = peers.num_devices, me = peers.rank, tokens = step.num_tokens;
  const int choices = tokens * step.top_k;
  const Given& given = step.of_device[me];
  static constexpr ExpertParts kParts[] = {{1, {3}}, {2, {1, 3}}, {2, {2, 3}}, {3, {1, 2, 3}}};
  static_assert(kLocal == 3);
  std::vector<int32_t> ids(n * choices);
  std::vector<uint16_t> of_token(tokens * kMaxExpertParts);
  std::vector<uint32_t> pushed(kMaxExpertParts, 7), came(kLocal, 7);
  PeerOrdered params{};
  params.peers = &peers;
  params.size = {tokens, step.top_k, kLocal, n, tag};
  params.parts = kParts[tag % 4];
  params.place = &place;
  params.slots = given.slots.data();
  params.devices = of_token.data();
  params.pushed = pushed.data();
  params.came = came.data();
  params.unit = UnitOfParts(params.parts);
  params.all_ids = ids.data();
  params.arrays[0] = {reinterpret_cast<const char*>(given.tokens.data()), step.hidden * 4};
  params.arrays[1] = {reinterpret_cast<const char*>(given.small.data()), step.small_floats * 4};
  params.num_arrays = step.small_floats > 0 ? 2 : 1;
  emulated::Launch(step.ctas, 64, [&] { PeerOfferKernel(params); });
  int wrong = 0;
  std::thread pushing(
      [&] { emulated::Launch(step.ctas + 1, 64, [&] { PeerPushKernel(params); }); });
  // The step may end before all of its kernels begin.
  for (int ms = 0; late && peers.own->failed == 0 && ms < 2000; ++ms) {
    if (LoadAcquireSystem(&peers.own->finished) == peers.own->begun) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  emulated::Launch(step.ctas, 64, [&] { PeerTakeKernel(params); });
  const auto check = [&](int end) {  // rows with an expert before that one
    const char* half = peers.bases[me] + kPeerHeaderBytes + peers.half_bytes;
    for (int row = 0; row < n * tokens; ++row) {
      const Given& other = step.of_device[row / tokens];
      const int token = row % tokens;
      bool there = false;
      for (int k = 0; k < step.top_k; ++k) {
        const int64_t slot = other.slots[token * step.top_k + k];
        there |= slot >= me * kLocal && slot < me * kLocal + end;
      }
      for (int i = 0; i < params.num_arrays && there; ++i) {
        const int64_t bytes = params.arrays[i].row_bytes;
        const auto& all = i == 0 ? other.tokens : other.small;
        const char* from = reinterpret_cast<const char*>(all.data()) + token * bytes;
        wrong += std::memcmp(half + PlacesOf(params).arrays[i] + row * bytes, from, bytes) != 0;
      }
    }
  };
  emulated::Launch(1, 32, [&] { PeerFirstKernel(params); });
  if (fails) {
    for (uint32_t word : came) wrong += word != 1 && params.unit == 1;
    pushing.join();
    for (int32_t id : ids) wrong += id != -1;
    return wrong + (peers.own->failed == 0);
  }
  check(params.parts.ends[0]);
  for (int expert = 0; expert < kLocal; ++expert) {
    while (LoadAcquireSystem(&came[expert / params.unit]) == 0) std::this_thread::yield();
    check(expert + 1);
  }
  pushing.join();
  if (late) std::this_thread::sleep_for(std::chrono::milliseconds(8));
  check(kLocal);
  wrong += peers.own->finished != NextStep(peers) - 1 || peers.own->step % 2 != 1;
  for (int i = 0; i < n * choices; ++i) {
    const int64_t slot = step.of_device[i / choices].slots[i % choices];
    const bool here = slot >= me * kLocal && slot < (me + 1) * kLocal;
    wrong += ids[i] != (here ? slot - me * kLocal : -1);
  }
  return wrong;
}

int Main(int devices, int steps, int seed, const std::string& fault, int fault_step) {
  std::vector<Memory> memory(devices);
  std::vector<PeerFailure> failures(devices);
  std::vector<std::thread> running;
  std::atomic<int> wrong{0};
  for (int me = 0; me < devices; ++me) {
    running.emplace_back([&, me] {
      Peers peers{};
      for (int i = 0; i < devices; ++i) peers.bases[i] = memory[i].base();
      peers.own = reinterpret_cast<PeerHeader*>(peers.bases[me]);
      peers.num_devices = devices;
      peers.rank = me;
      peers.place = 100 + me;
      peers.half_bytes = kHalfBytes;
      peers.few_bytes = kFewBytes;
      peers.line_bytes = kLineBytes;
      const bool spoils = fault == "spoils", leaves = fault == "orderless";
      const bool orders = leaves || fault == "ordered";
      const bool is_beside = spoils || orders || fault == "beside";
      const bool soon = leaves || fault == "leaves" || fault == "none";
      peers.timeout_ns = soon ? 2'000'000'000 : is_beside ? 8'000'000'000 : 60'000'000'000;
      peers.failure = &failures[me];
      std::mt19937 random(seed + 7 * me);
      for (int number = 0; number < steps && is_beside; ++number) {
        const Step step = Draw(devices, seed, number);
        const bool spoilt = spoils && me == 1 && number == steps - 1;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
        const bool whole = step.hidden % 4 == 0, late = random() % 4 == 0;
        const bool beside = whole && std::mt19937(seed * 7919 + number)() % 2 == 0;
        const bool ordered = orders && beside && std::mt19937(seed * 7907 + number)() % 3 > 0;
        // A CTA that only takes what came begins when all others have come to what is next.
        const uint32_t next = NextStep(peers) + 1;
        const std::function<void()> wait = [&, next] { AwaitOthers(peers, next); };
        const bool slow = IsSlow(peers, number) && number + 1 < steps && !step.few && !beside;
        emulated::before_last = slow ? &wait : nullptr;
        const auto run = whole ? Run<uint4, 4> : Run<uint32_t, 1>;
        if (leaves && number >= fault_step) {
          if (me == 1) return;
          if (!whole) continue;
          wrong += RunOrdered(step, peers, peers.place, number, late, true);
          break;
        }
        const int found = ordered  ? RunOrdered(step, peers, peers.place, number, late, false)
                          : beside ? RunBeside(step, peers, peers.place, number, late, spoilt)
                                   : run(step, peers, peers.place, number, 0, false);
        if (found != 0) std::printf("device %d step %d: %d wrong\n", me, number, found);
        wrong += found;
      }
      for (int number = 0; number < steps && !is_beside; ++number) {
        const bool at_fault = me == 1 && number == fault_step;
        if (at_fault && fault == "leaves") return;
        const Step step = Draw(devices, seed, number);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
        const bool failed = !fault.empty() && number >= fault_step;
        const int last = std::min(steps, fault.empty() ? steps : fault_step) - 1;  // all come to it
        if (IsSlow(peers, number - 1) && number <= last) {
          AwaitOthers(peers, number + 1);
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        const uint32_t read_after = IsSlow(peers, number) && number < last ? number + 2 : 0;
        const int32_t place = peers.place + (at_fault && fault == "moved");
        const uint32_t tag = number + (at_fault && fault == "differs");
        const auto run = step.hidden % 4 == 0 ? Run<uint4, 4> : Run<uint32_t, 1>;
        const int found = run(step, peers, place, tag, read_after, failed);
        if (found != 0) {
          std::printf("device %d step %d: %d wrong\n", me, number, found);
          wrong += found;
        }
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  for (int me = 0; me < devices; ++me) {
    const PeerFailure& failure = failures[me];
    std::printf("device %d: code %d device %d step %u\n",
                me,
                static_cast<int>(failure.code),
                failure.device,
                failure.step);
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jaxmoe

int main(int count, char** given) {
  const auto number = [&](int i) { return i < count ? std::atoi(given[i]) : 0; };
  return jaxmoe::Main(number(1), number(2), number(3), count > 4 ? given[4] : "", number(5));
}
