# How llama.cpp is built for swarm-node. GPU switches (GGML_CUDA, GGML_HIP, GGML_VULKAN, GGML_METAL, …)
# come from the user through CMAKE_ARGS and are left alone: llama.cpp's own checks fail the
# configuration when an asked-for toolkit is missing.

set(BUILD_SHARED_LIBS ON)

# Two busy OpenMP pools on one machine slow each other down a hundredfold; ggml's own pool can wait
# without spinning.
set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
set(GGML_RPC ${SWARM_TOOLS} CACHE BOOL "" FORCE)
set(GGML_BACKEND_DL OFF CACHE BOOL "" FORCE)

set(LLAMA_BUILD_COMMON ${SWARM_ROUTER} CACHE BOOL "" FORCE)
set(LLAMA_BUILD_TOOLS ${SWARM_ROUTER} CACHE BOOL "" FORCE)
set(LLAMA_BUILD_SERVER ${SWARM_ROUTER} CACHE BOOL "" FORCE)
set(LLAMA_BUILD_TESTS OFF CACHE BOOL "" FORCE)
set(LLAMA_BUILD_EXAMPLES OFF CACHE BOOL "" FORCE)
set(LLAMA_BUILD_APP OFF CACHE BOOL "" FORCE)
set(LLAMA_TOOLS_INSTALL OFF CACHE BOOL "" FORCE)
# The web page would be fetched at build time, and the server listens on loopback only.
set(LLAMA_BUILD_UI OFF CACHE BOOL "" FORCE)
set(LLAMA_USE_PREBUILT_UI OFF CACHE BOOL "" FORCE)
set(LLAMA_OPENSSL OFF CACHE BOOL "" FORCE)
set(LLAMA_ALL_WARNINGS OFF CACHE BOOL "" FORCE)

# One id for everything that is built together, compiled into each part and compared at start:
# source, compiler, build type and every ggml switch.
if(SWARM_LLAMA_CPP_DIR)
    file(GLOB_RECURSE swarm_id_sources "${SWARM_LLAMA_CPP_SOURCE}/ggml/include/*.h" "${SWARM_LLAMA_CPP_SOURCE}/ggml/src/*.[ch]*")
    set(swarm_id_text "")
    foreach(source IN LISTS swarm_id_sources)
        file(SHA256 "${source}" hash)
        string(APPEND swarm_id_text "${hash}")
    endforeach()
else()
    set(swarm_id_text "${SWARM_SDIST_SHA256}")
endif()
get_cmake_property(swarm_cache_variables CACHE_VARIABLES)
list(SORT swarm_cache_variables)
foreach(name IN LISTS swarm_cache_variables)
    # Only what was given on the command line or set above: ggml adds its defaults to the cache
    # later, and a second configure run must give the same id.
    if(name MATCHES "^GGML_(CUDA|HIP|VULKAN|METAL|SYCL|OPENCL|MUSA|CANN|BLAS|NATIVE|CPU_ALL_VARIANTS|AVX|AVX2|AVX512|FMA|F16C|OPENMP|LLAMAFILE)$")
        get_property(swarm_value CACHE "${name}" PROPERTY VALUE)
        string(APPEND swarm_id_text ";${name}=${swarm_value}")
    endif()
endforeach()
string(APPEND swarm_id_text ";${CMAKE_CXX_COMPILER_ID}-${CMAKE_CXX_COMPILER_VERSION};${CMAKE_SYSTEM_PROCESSOR};${CMAKE_BUILD_TYPE}")
if(NOT DEFINED CACHE{SWARM_BUILD_ID})
    string(SHA256 swarm_id_hash "${swarm_id_text}")
    string(SUBSTRING "${swarm_id_hash}" 0 16 swarm_id_short)
    set(SWARM_BUILD_ID "${swarm_id_short}" CACHE INTERNAL "id compiled into every native part of this build")
endif()
# ggml asks git for a commit of its own, which would be that of whatever repository surrounds the source.
set(GIT_EXE "" CACHE FILEPATH "" FORCE)
set(LLAMA_BUILD_NUMBER 0)
set(GGML_BUILD_COMMIT "swarm-${SWARM_BUILD_ID}")
set(LLAMA_BUILD_COMMIT "swarm-${SWARM_BUILD_ID}")
