// Ctrl-C. Long work polls interrupted(); what an interrupt means (stop the answer, end the program) is the caller's
// choice.
#pragma once

namespace fourfold {

// Installs a SIGINT handler that sets a flag. A second SIGINT before the flag is cleared ends the process (status 130),
// so that nothing can make the program deaf.
void install_interrupt_handler();
bool interrupted();
void clear_interrupt();

}  // namespace fourfold
