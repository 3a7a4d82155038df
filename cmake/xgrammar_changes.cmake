# What we change in xgrammar's source (docs/structure.md says why).

# The mask near the end of a rule with max_chars: every token that is longer than what is left is tried byte by byte,
# some 200,000 of them. Where a byte leads depends on the row of states alone, so rows are remembered with where their
# bytes led, and most tokens are looked up.
set(matcher ${root}/cpp/grammar_matcher.cc)
change_xgrammar(${matcher} [==[
  int32_t previous_index = -1;
  int32_t previous_matched_size = 0;
  temporary_input_start_row_ = initial_state_history_size - 1;
  temporary_input_bytes_.clear();
  std::vector<int32_t> byte_rejected_tokens;

  for (int32_t index : tokens_to_check) {
    const std::string& token = vocab[index].second;
    int32_t common_prefix_length = 0;
    if (previous_index >= 0) {
      common_prefix_length = std::mismatch(
                                 vocab[previous_index].second.begin(),
                                 vocab[previous_index].second.end(),
                                 token.begin(),
                                 token.end()
                             )
                                 .first -
                             vocab[previous_index].second.begin();
      common_prefix_length = std::min(common_prefix_length, previous_matched_size);
    }
    PopLastStates(
        scanable_state_history_.size() - initial_state_history_size - common_prefix_length
    );
    temporary_input_bytes_.resize(common_prefix_length);

    bool accepted = !token.empty();
    int32_t matched_size = common_prefix_length;
    for (; matched_size < static_cast<int32_t>(token.size()); ++matched_size) {
      if (!AdvanceWithCharacterBudget(static_cast<uint8_t>(token[matched_size]))) {
        accepted = false;
        break;
      }
      temporary_input_bytes_.push_back(token[matched_size]);
    }
    if (accepted) {
      tmp_accepted_bitset_.Set(vocab[index].first, true);
    } else {
      byte_rejected_tokens.push_back(index);
    }
    previous_index = index;
    previous_matched_size = matched_size;
  }
]==] [==[
  temporary_input_start_row_ = initial_state_history_size - 1;
  temporary_input_bytes_.clear();
  std::vector<int32_t> byte_rejected_tokens;

  // Changed by fourfold: rows are remembered, with the row that each byte leads to.
  constexpr int32_t kUnknown = -1, kRefused = -2, kUnshared = -3;
  constexpr size_t kMaxRows = 4096;
  std::vector<std::array<int32_t, 256>> rows;
  std::unordered_map<std::string, int32_t> row_ids;
  std::string row_key;
  // kUnshared: it refers to rows that are those of one token, or there are too many.
  const auto id_of_latest_row = [&]() -> int32_t {
    const auto& row = scanable_state_history_[scanable_state_history_.size() - 1];
    row_key = std::to_string(GetCurrentCharIndex());
    row_key += IsCompleted() ? '+' : '-';
    for (const ParserState& state : row) {
      if (state.rule_start_pos >= initial_state_history_size) return kUnshared;
      row_key.append(reinterpret_cast<const char*>(&state), sizeof(ParserState));
    }
    const auto [known, fresh] = row_ids.try_emplace(row_key, static_cast<int32_t>(rows.size()));
    if (fresh) {
      if (rows.size() == kMaxRows) {
        row_ids.erase(known);
        return kUnshared;
      }
      rows.emplace_back().fill(kUnknown);
    }
    return known->second;
  };

  std::vector<int32_t> path = {id_of_latest_row()};  // behind each byte of the token that was accepted
  const std::string* previous_token = nullptr;
  for (int32_t index : tokens_to_check) {
    const std::string& token = vocab[index].second;
    size_t matched_size = 0;
    if (previous_token != nullptr) {
      const auto parted =
          std::mismatch(previous_token->begin(), previous_token->end(), token.begin(), token.end());
      matched_size = std::min<size_t>(parted.second - token.begin(), path.size() - 1);
    }
    path.resize(matched_size + 1);
    bool accepted = !token.empty();
    for (; matched_size < token.size(); ++matched_size) {
      const uint8_t byte = static_cast<uint8_t>(token[matched_size]);
      const int32_t row = path.back();
      int32_t next = row >= 0 ? rows[row][byte] : kUnknown;
      if (next == kUnknown) {
        // The parser goes to where the token is, and on by its byte.
        std::string& bytes = temporary_input_bytes_;
        const size_t most = std::min(bytes.size(), matched_size);
        const size_t kept = std::mismatch(bytes.begin(), bytes.begin() + most, token.begin()).first - bytes.begin();
        PopLastStates(bytes.size() - kept);
        bytes.resize(kept);
        bool arrived = true;
        while (arrived && bytes.size() < matched_size) {
          const char again = token[bytes.size()];
          arrived = AdvanceWithCharacterBudget(static_cast<uint8_t>(again));
          if (arrived) bytes.push_back(again);
        }
        next = kRefused;
        if (arrived && AdvanceWithCharacterBudget(byte)) {
          bytes.push_back(token[matched_size]);
          next = id_of_latest_row();
        }
        if (row >= 0) rows[row][byte] = next;
      }
      if (next == kRefused) {
        accepted = false;
        break;
      }
      path.push_back(next);
    }
    if (accepted) {
      tmp_accepted_bitset_.Set(vocab[index].first, true);
    } else if (has_token_edges_) {  // only they take a token whose bytes are refused
      byte_rejected_tokens.push_back(index);
    }
    previous_token = &token;
  }
]==])
change_xgrammar(${matcher} [==[
namespace xgrammar {
]==] [==[
#include <array>

namespace xgrammar {
]==])

# A grammar that takes too long to compile can be stopped, between two of its states.
set(compiler ${root}/cpp/grammar_compiler.cc)
change_xgrammar(${compiler} [==[
  auto add_adaptive_token_mask = [&](const ParserState& state, bool is_root_rule) {
]==] [==[
  auto add_adaptive_token_mask = [&](const ParserState& state, bool is_root_rule) {
    AskWhetherToStop();  // Changed by fourfold.
]==])
change_xgrammar(${compiler} [==[
CompiledGrammar GrammarCompilerSub::MultiThreadCompileGrammar(Grammar grammar_unoptimized) {
]==] [==[
void AskWhetherToStop();

CompiledGrammar GrammarCompilerSub::MultiThreadCompileGrammar(Grammar grammar_unoptimized) {
]==])
