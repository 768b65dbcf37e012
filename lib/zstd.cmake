# Debian's libzstd-dev ships no CMake package: find header and library, static first (it goes into the probe, which must not
# share a libzstd with the process that it is loaded into).
find_path(ZSTD_INCLUDE_DIR zstd.h REQUIRED)
find_library(ZSTD_LIBRARY NAMES libzstd.a zstd REQUIRED)
add_library(forkpoint_zstd INTERFACE)
target_include_directories(forkpoint_zstd INTERFACE ${ZSTD_INCLUDE_DIR})
target_link_libraries(forkpoint_zstd INTERFACE ${ZSTD_LIBRARY})
