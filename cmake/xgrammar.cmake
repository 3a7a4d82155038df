# xgrammar: grammars as masks over tokens, from PyPI's source distribution (packages/pypi-build.txt has version and hash).
# Only its C++ core is compiled, without Python, as the target xgrammar::xgrammar.
#
# The archive is downloaded by pip at the first configuration into FOURFOLD_PYPI_DIR, which all presets share. An archive
# that lies there is used as it is, when its hash is right.
set(FOURFOLD_PYPI_DIR ${PROJECT_SOURCE_DIR}/build/pypi CACHE PATH "Where source distributions from PyPI are kept")

set(requirement_file ${PROJECT_SOURCE_DIR}/packages/pypi-build.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${requirement_file})
file(STRINGS ${requirement_file} requirement REGEX "^xgrammar==")
if(NOT requirement MATCHES "^xgrammar==([0-9.]+) --hash=sha256:([0-9a-f]+)$")
  message(FATAL_ERROR "packages/pypi-build.txt: a line \"xgrammar==VERSION --hash=sha256:HASH\" is wanted, found \"${requirement}\"")
endif()
set(name xgrammar-${CMAKE_MATCH_1})
set(wanted ${CMAKE_MATCH_2})
set(archive ${FOURFOLD_PYPI_DIR}/${name}.tar.gz)

set(found "")
if(EXISTS ${archive})
  file(SHA256 ${archive} found)
endif()
if(NOT found STREQUAL wanted)
  file(REMOVE ${archive})
  find_program(FOURFOLD_PYTHON python3)
  set(status "python3 is missing")
  if(FOURFOLD_PYTHON)
    message(STATUS "Downloading ${name} from PyPI")
    file(MAKE_DIRECTORY ${FOURFOLD_PYPI_DIR})
    # Wheels for pip's own needs: with the requirement file's --no-binary it would compile those, too.
    execute_process(
      COMMAND ${FOURFOLD_PYTHON} -m pip download --quiet --disable-pip-version-check --no-deps --no-binary xgrammar
              --require-hashes --dest ${FOURFOLD_PYPI_DIR} --requirement ${requirement_file}
      RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 300)
  endif()
  if(NOT EXISTS ${archive})
    message(FATAL_ERROR "${name} could not be downloaded by pip (${status}).\n${output}\n"
      "It is the source distribution of ${name} on PyPI. Without network, put the archive at\n  ${archive}\n"
      "or configure with -DFOURFOLD_XGRAMMAR=OFF: requests for structured output and forced calls are refused then.")
  endif()
  file(SHA256 ${archive} found)
  if(NOT found STREQUAL wanted)
    message(FATAL_ERROR "${archive} has the SHA-256 ${found}, ${wanted} is wanted")
  endif()
endif()

# Replaces text that stands in one of its files exactly once.
function(change_xgrammar file old new)
  file(READ ${file} text)
  string(FIND "${text}" "${old}" first)
  string(FIND "${text}" "${old}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "${file} does not have the text that cmake/xgrammar_changes.cmake replaces exactly once:\n${old}")
  endif()
  string(REPLACE "${old}" "${new}" text "${text}")
  file(WRITE ${file} "${text}")
endfunction()

set(root ${CMAKE_BINARY_DIR}/pypi/${name})
set(changes ${CMAKE_CURRENT_LIST_DIR}/xgrammar_changes.cmake)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${changes})
file(SHA256 ${changes} changed)
string(SHA256 stamp "${wanted} ${changed}")
if(NOT EXISTS ${root}/.${stamp})
  file(REMOVE_RECURSE ${root})
  file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${CMAKE_BINARY_DIR}/pypi
       PATTERNS "*/cpp/*" "*/include/*" "*/picojson.h" "${name}/LICENSE" "${name}/NOTICE")
  include(${changes})
  file(TOUCH ${root}/.${stamp})
endif()

file(GLOB_RECURSE sources ${root}/cpp/*.cc)
list(FILTER sources EXCLUDE REGEX "/cpp/(tvm_ffi/|support/logging\\.cc)")
add_library(xgrammar STATIC EXCLUDE_FROM_ALL ${sources})
add_library(xgrammar::xgrammar ALIAS xgrammar)
target_include_directories(xgrammar SYSTEM PUBLIC ${root}/include ${root}/3rdparty/dlpack/include
                                                  ${root}/3rdparty/picojson)
# Its messages come to us (src/structure/xgrammar_compiler.cpp) and not to standard error.
target_compile_definitions(xgrammar PUBLIC XGRAMMAR_ENABLE_CPPTRACE=0 XGRAMMAR_ENABLE_INTERNAL_CHECK=0
                                           XGRAMMAR_LOG_CUSTOMIZE=1)
# In a few units: half of the time of each file is its headers.
set_target_properties(xgrammar PROPERTIES CXX_STANDARD 17 UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
target_compile_options(xgrammar PRIVATE -w)
install(FILES ${root}/LICENSE ${root}/NOTICE DESTINATION share/doc/fourfold/xgrammar)
