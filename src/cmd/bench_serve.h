// fourfold bench serve
#pragma once

namespace fourfold::cmd {

class Command;
void add_bench_serve(Command& bench);

}  // namespace fourfold::cmd
