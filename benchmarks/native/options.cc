// Parsing of gemm_bench's command line, names included.
#include "benchmarks/native/options.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include "csrc/gemm/args.h"

namespace jaxmoe::bench {
namespace {

constexpr int kMaxTokens = 65536;
constexpr int kMaxSustainedMs = 60000;

template <class T>
struct Named {
  const char* name;
  T value;
};

// The published layers of jaxmoe/_testing.py.
constexpr Named<Model> kModels[] = {
    {"mixtral-8x7b", {"mixtral-8x7b", 4096, 14336, 8, 2}},
    {"qwen3-30b-a3b", {"qwen3-30b-a3b", 2048, 768, 128, 8}},
    {"deepseek-v3", {"deepseek-v3", 7168, 2048, 256, 8}},
    {"gpt-oss-120b", {"gpt-oss-120b", 2880, 2880, 128, 4}},
};
constexpr Named<Op> kOps[] = {{"gemm1", Op::kGemm1}, {"gemm2", Op::kGemm2}, {"layer", Op::kLayer}};
constexpr Named<Skew> kSkews[] = {
    {"uniform", Skew::kUniform}, {"zipf", Skew::kZipf}, {"one_expert", Skew::kOneExpert}};
constexpr Named<WeightLayout> kLayouts[] = {{"nk", WeightLayout::kNK}, {"kn", WeightLayout::kKN}};

[[noreturn]] void Refuse(const std::string& flag,
                         const std::string& text,
                         const std::string& allowed) {
  throw std::invalid_argument(flag + " '" + text + "': allowed is " + allowed);
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

bool ReadInt(const std::string& text, int* value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end;
}

int ParseInt(const std::string& flag, const std::string& text, int least, int most) {
  int value = 0;
  if (!ReadInt(text, &value) || value < least || value > most) {
    Refuse(flag, text, "an integer from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

template <class T, size_t kSize>
T ParseName(const std::string& flag, const std::string& text, const Named<T> (&names)[kSize]) {
  std::string allowed;
  for (const Named<T>& named : names) {
    if (text == named.name) return named.value;
    allowed += std::string(allowed.empty() ? "" : ", ") + named.name;
  }
  Refuse(flag, text, allowed);
}

template <class T, size_t kSize>
std::vector<T> ParseNames(const std::string& flag,
                          const std::string& text,
                          const Named<T> (&names)[kSize]) {
  std::vector<T> values;
  for (const std::string& part : Split(text, ',')) values.push_back(ParseName(flag, part, names));
  return values;
}

template <class T, size_t kSize>
const char* NameOf(T value, const Named<T> (&names)[kSize]) {
  return std::find_if(std::begin(names),
                      std::end(names),
                      [&](const Named<T>& named) { return named.value == value; })
      ->name;
}

bool SameKernel(const TileConfig& a, const TileConfig& b) {
  return a.weight_tile == b.weight_tile && a.token_tile == b.token_tile && a.cluster == b.cluster &&
         a.split_k == b.split_k;
}

bool ReadTile(const std::string& text, TileConfig* tile) {
  const std::vector<std::string> parts = Split(text, ':');
  const std::vector<std::string> sizes = Split(parts[0], 'x');
  if (sizes.size() < 2 || sizes.size() > 3) return false;
  if (!ReadInt(sizes[0], &tile->weight_tile) || !ReadInt(sizes[1], &tile->token_tile)) return false;
  if (sizes.size() == 3 && !ReadInt(sizes[2], &tile->cluster)) return false;
  const auto read = [](const std::string& part, const std::string& name, int* value) {
    return part.compare(0, name.size(), name) == 0 && ReadInt(part.substr(name.size()), value) &&
           *value >= 0;
  };
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i] == "gather") {
      tile->gather = true;
    } else if (!read(parts[i], "raster=", &tile->raster) &&
               !read(parts[i], "split=", &tile->split_k)) {
      return false;
    }
  }
  return true;
}

TileConfig ParseTile(const std::string& flag,
                     const std::string& text,
                     const std::vector<TileConfig>& known) {
  TileConfig tile;
  const auto same = [&](const TileConfig& other) { return SameKernel(tile, other); };
  if (ReadTile(text, &tile) && std::any_of(known.begin(), known.end(), same)) return tile;
  std::string allowed;
  for (const TileConfig& other : known) allowed += Name(other) + ", ";
  Refuse(flag, text, allowed + "each with :gather, :raster=N (N >= 0) or both");
}

}  // namespace

const char kUsage[] =
    "gemm_bench [options]: times the grouped GEMMs and the fused layer, bf16, without JAX\n"
    "  --models NAME,...    mixtral-8x7b, qwen3-30b-a3b (default), deepseek-v3, gpt-oss-120b\n"
    "  --tokens T,...       default 1,64,1024,4096\n"
    "  --skew NAME          uniform (default), zipf, one_expert\n"
    "  --what NAME,...      gemm1, gemm2, layer; default all three\n"
    "  --tiles TILE,...     as 256x160x2:gather:raster=8 or 128x8:split=2, weight rows x tokens\n"
    "                       [x cluster];\n"
    "                       default: those that make sense for the rows of an expert\n"
    "  --down TILE          of the layer's down product; default the same as its gate-up product\n"
    "  --layout NAME        nk (default), kn\n"
    "  --sustained-ms MS    time so long back to back too, default 0: bursts only\n"
    "  --check              compare sampled rows of each product with a naive kernel first\n"
    "  --help\n";

Options ParseOptions(int argc, char** argv) {
  Options options;
  options.models = ParseNames("--models", "qwen3-30b-a3b", kModels);
  const char* tiles = nullptr;
  const char* down = nullptr;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--check") {
      options.check = true;
      continue;
    }
    if (flag == "--help") {
      options.help = true;
      continue;
    }
    const char* const with_value[] = {"--models",
                                      "--tokens",
                                      "--skew",
                                      "--what",
                                      "--tiles",
                                      "--down",
                                      "--layout",
                                      "--sustained-ms"};
    if (std::find(std::begin(with_value), std::end(with_value), flag) == std::end(with_value)) {
      std::string allowed;
      for (const char* name : with_value) allowed += std::string(name) + ", ";
      Refuse("argument", flag, allowed + "--check, --help");
    }
    if (++i == argc) throw std::invalid_argument(flag + " needs a value, see --help");
    const std::string text = argv[i];
    if (flag == "--models") {
      options.models = ParseNames(flag, text, kModels);
    } else if (flag == "--tokens") {
      options.tokens.clear();
      for (const std::string& part : Split(text, ',')) {
        options.tokens.push_back(ParseInt(flag, part, 1, kMaxTokens));
      }
    } else if (flag == "--skew") {
      options.skew = ParseName(flag, text, kSkews);
    } else if (flag == "--what") {
      options.ops = ParseNames(flag, text, kOps);
    } else if (flag == "--tiles") {
      tiles = argv[i];
    } else if (flag == "--down") {
      down = argv[i];
    } else if (flag == "--layout") {
      options.layout = ParseName(flag, text, kLayouts);
    } else {
      options.sustained_ms = ParseInt(flag, text, 0, kMaxSustainedMs);
    }
  }
  if (tiles != nullptr) {  // last, because the layout says which there are
    const std::vector<TileConfig> known = InstantiatedTiles(options.layout);
    for (const std::string& part : Split(tiles, ',')) {
      options.tiles.push_back(ParseTile("--tiles", part, known));
    }
  }
  if (down != nullptr) {
    options.down.push_back(ParseTile("--down", down, InstantiatedTiles(options.layout)));
  }
  return options;
}

std::vector<TileConfig> InstantiatedTiles(WeightLayout layout) {
  const VariantTable table = layout == WeightLayout::kNK ? Bf16NkVariants() : Bf16KnVariants();
  std::vector<TileConfig> tiles;
  for (int i = 0; i < table.size; ++i) {
    const Variant& variant = table.rows[i];
    TileConfig tile;
    tile.weight_tile = variant.weight_tile;
    tile.token_tile = variant.token_tile;
    tile.cluster = variant.cluster;
    tile.split_k = variant.split_k;
    tiles.push_back(tile);
  }
  return tiles;
}

const char* Name(Op op) { return NameOf(op, kOps); }
const char* Name(Skew skew) { return NameOf(skew, kSkews); }
const char* Name(WeightLayout layout) { return NameOf(layout, kLayouts); }

std::string Name(const TileConfig& tile) {
  std::string name = std::to_string(tile.weight_tile) + "x" + std::to_string(tile.token_tile);
  if (tile.cluster != 1) name += "x" + std::to_string(tile.cluster);
  if (tile.split_k != 1) name += ":split=" + std::to_string(tile.split_k);
  if (tile.gather) name += ":gather";
  if (tile.raster != 1) name += ":raster=" + std::to_string(tile.raster);
  return name;
}

}  // namespace jaxmoe::bench
