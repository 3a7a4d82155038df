// Gives fourfold_test_headers a file to compile; its precompiled headers are what counts.
