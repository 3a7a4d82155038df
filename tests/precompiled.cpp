// Gives what precompiles the headers of tests a file to compile; those headers are what counts.
