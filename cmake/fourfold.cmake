# Headers that every file of a target is compiled after, read once.
function(fourfold_precompile target)
  if(ARGN)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# fourfold_library(NAME [HOT] SOURCES ... DEPENDS ... [PRECOMPILE ...]): the static library of one folder under src/.
#
# A folder's include path is src/, and it links only what it names, so that a wrong arrow between folders does not link.
# HOT compiles it with -O3; PRECOMPILE names large headers that most of its files include. Without sources the target is
# an interface library.
function(fourfold_library name)
  cmake_parse_arguments(ARG "HOT" "" "SOURCES;DEPENDS;PRECOMPILE" ${ARGN})
  set(target fourfold_${name})
  if(ARG_SOURCES)
    add_library(${target} STATIC ${ARG_SOURCES})
    target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(${target} PUBLIC ${ARG_DEPENDS} PRIVATE fourfold_flags)
    if(ARG_HOT)
      target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O3>)
    endif()
    fourfold_precompile(${target} ${ARG_PRECOMPILE})
  else()
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(${target} INTERFACE ${ARG_DEPENDS})
  endif()
  add_library(fourfold::${name} ALIAS ${target})
endfunction()

# The family of processors: what is for one family alone, sources, flags and tests, asks this and nothing else.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(FOURFOLD_FAMILY x86)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(FOURFOLD_FAMILY arm)
else()
  set(FOURFOLD_FAMILY other)
endif()

# fourfold_system_library(NAME HEADER LIBRARY...): the target system::NAME, found by a header and by one of the library's
# names. For packages whose headers can be installed for one architecture only (when another is built for, there is the
# library alone, under the name that programs load), or that want much else to be there for pkg-config.
function(fourfold_system_library name header)
  find_path(FOURFOLD_${name}_INCLUDE ${header} REQUIRED)
  find_library(FOURFOLD_${name}_LIBRARY NAMES ${ARGN} REQUIRED)
  add_library(system_${name} INTERFACE)
  target_include_directories(system_${name} SYSTEM INTERFACE ${FOURFOLD_${name}_INCLUDE})
  target_link_libraries(system_${name} INTERFACE ${FOURFOLD_${name}_LIBRARY})
  add_library(system::${name} ALIAS system_${name})
endfunction()

# Warnings and sanitizers, the same for every target of ours.
add_library(fourfold_flags INTERFACE)
target_compile_options(fourfold_flags INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor)
if(FOURFOLD_WERROR)
  target_compile_options(fourfold_flags INTERFACE -Werror)
endif()
if(FOURFOLD_FAMILY STREQUAL arm)
  # Fused multiply-adds belong to arm64's baseline; plain code rounds as it does on x86-64's, kernels name theirs.
  target_compile_options(fourfold_flags INTERFACE -ffp-contract=off)
endif()
if(FOURFOLD_SANITIZE)
  # Also for third-party headers: a whole program is instrumented or none of it.
  add_compile_options(-fsanitize=${FOURFOLD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${FOURFOLD_SANITIZE})
endif()
