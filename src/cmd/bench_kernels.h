// `fourfold bench kernels`: the expert layer on a GPU, beside what the card can do at most. And what it shares with
// `fourfold tune`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fourfold::cmd {

class Command;

// Adds the subcommand `kernels` to `fourfold bench`.
void add_bench_kernels(Command& bench_app);

// "1,8,64" as token counts, each 1 to the largest bucket; sorted, each once. Error naming what is wrong.
std::vector<int64_t> parse_tokens(const std::string& text);

}  // namespace fourfold::cmd
