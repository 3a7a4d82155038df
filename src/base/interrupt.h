// Ctrl-C. Long work polls interrupted(); what an interrupt means (stop the answer, end the program) is the caller's
// choice.
#pragma once

#include <stdexcept>

namespace fourfold {

// Installs a SIGINT handler that sets a flag. A second SIGINT before the flag is cleared ends the process (status 130),
// so that nothing can make the program deaf.
void install_interrupt_handler();
bool interrupted();
void clear_interrupt();

// Ends the work that a Ctrl-C was meant to end; main() prints its line and exits with 130, as shells expect.
class Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("interrupted") {}
  using std::runtime_error::runtime_error;
};
void throw_if_interrupted();

// Waits until reading from `fd` would not block. False: there is an interrupt that nobody has cleared, whether it came
// before the wait or during it and whichever thread took it; a blocking read() learns only of those that it takes
// itself.
bool wait_for_input(int fd);

}  // namespace fourfold
