#include "op_harness.h"
