# Toolchain: arm64 programs of Debian, built on x86-64 with packages/apt-aarch64.txt, run by qemu-user.
# FOURFOLD_QEMU_CPU: the processor that is emulated (qemu-aarch64 -cpu help).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)

set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

# Libraries by multiarch: only what lies in the folders of arm64, headers without an architecture from the host's packages.
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_IGNORE_PREFIX_PATH /usr/local)
set(CMAKE_SYSTEM_IGNORE_PATH /usr/lib/x86_64-linux-gnu /lib/x86_64-linux-gnu)
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig)

# libc6:arm64 brings the loader and the libraries under their own names, so there is no other root to look in.
set(FOURFOLD_QEMU_CPU max,sve=off CACHE STRING "Processor that qemu-aarch64 emulates")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu ${FOURFOLD_QEMU_CPU})
