#include <fmt/format.h>

#include <algorithm>

#include "cli/bisect_stages.h"
#include "cli/terminal.h"
#include "lib/operand_compare.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

std::string name_of(const OperandPair& pair) {
  const OperandKey& key = pair.key;
  std::string place = place_text(name(key.phase), key.layer, key.op, key.tensor);
  if (key.micro_step > 0) place += fmt::format(", micro-step {}", key.micro_step);
  if (pair.call > 0) place += fmt::format(", call {}", pair.call);
  return fmt::format("rank {}, {}", key.rank, place);
}

std::string sentence_of(const OperandPair& pair) {
  if (!pair.report) return fmt::format("{}: {}", name_of(pair), pair.why_not);
  return fmt::format("{}: {}", name_of(pair), sentence(*pair.report, pair.shape));
}

}  // namespace

std::vector<std::string> operand_sentences(const std::string& good, const std::string& bad, const Divergence& first,
                                           int rank) {
  std::vector<OperandPair> pairs;
  try {
    pairs = compare_operands(good, bad);
  } catch (const Error& error) {
    return {fmt::format("the operands could not be compared: {}", error.what())};
  }
  std::erase_if(pairs, [&](const OperandPair& pair) { return pair.key.rank != rank; });
  // The op alone, if there is anything of it; else what the layer was handed and left in that phase.
  const auto keep = [&](auto&& wanted) {
    if (std::any_of(pairs.begin(), pairs.end(), wanted))
      std::erase_if(pairs, [&](const OperandPair& pair) { return !wanted(pair); });
  };
  if (first.kind != Kind::launch) {
    keep([&](const OperandPair& pair) { return pair.key.phase == first.phase; });
    if (!first.op.empty()) keep([&](const OperandPair& pair) { return pair.key.op == first.op; });
  }
  constexpr size_t kMost = 16;
  std::stable_partition(pairs.begin(), pairs.end(), [](const OperandPair& pair) { return pair.differs(); });
  std::vector<std::string> sentences;
  for (const OperandPair& pair : pairs) {
    if (sentences.size() == kMost) {
      sentences.push_back(fmt::format("and {} more", pairs.size() - kMost));
      break;
    }
    sentences.push_back(sentence_of(pair));
  }
  if (sentences.empty()) sentences.push_back(fmt::format("no operands were saved on rank {}", rank));
  return sentences;
}

}  // namespace forkpoint
