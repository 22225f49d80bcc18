// Tags of steps, by which programs whose steps differ in kind or sizes are told apart.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace jaxmoe {

// Kinds of steps.
inline constexpr int64_t kDispatchStep = 0;
inline constexpr int64_t kCombineStep = 1;
inline constexpr int64_t kFewDispatchStep = 2;
inline constexpr int64_t kFewCombineStep = 3;
inline constexpr int64_t kRowsStep = 4;
inline constexpr int64_t kPublishStep = 5;
inline constexpr int64_t kSumStep = 6;
inline constexpr int64_t kLinesDispatchStep = 7;
inline constexpr int64_t kLinesCombineStep = 8;
inline constexpr int64_t kOrderedStep = 9;

// A hash of the kind of a step and of its sizes.
inline uint32_t TagOf(std::initializer_list<int64_t> numbers) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (int64_t number : numbers) {
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ (static_cast<uint64_t>(number) >> 8 * byte & 0xff)) * 1099511628211u;
    }
  }
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

}  // namespace jaxmoe
