# How llama.cpp is built for swarm-node. GPU switches (GGML_CUDA, GGML_HIP, GGML_VULKAN, GGML_METAL, …)
# come from the user through CMAKE_ARGS and are left alone: llama.cpp's own checks fail the
# configuration when an asked-for toolkit is missing.

# CMake takes any name, so a backend asked for under a wrong one would silently be left out.
function(swarm_refuse_unknown_switches)
    file(GLOB_RECURSE files "${SWARM_LLAMA_CPP_SOURCE}/ggml/CMakeLists.txt" "${SWARM_LLAMA_CPP_SOURCE}/ggml/*.cmake")
    file(GLOB own_files "${CMAKE_SOURCE_DIR}/kernels/cmake/*.cmake")
    set(text "")
    list(APPEND files "${SWARM_LLAMA_CPP_SOURCE}/CMakeLists.txt" "${CMAKE_SOURCE_DIR}/CMakeLists.txt")
    foreach(file IN LISTS files own_files)
        file(READ "${file}" content)
        string(APPEND text "${content}\n")
    endforeach()
    string(REGEX MATCHALL "(GGML|SWARM)_[A-Za-z0-9_]+" known "${text}")
    string(REGEX MATCHALL "option\\( *(GGML|SWARM)_[A-Za-z0-9_]+" switches "${text}")
    list(TRANSFORM switches REPLACE "^option\\( *" "")
    list(SORT switches)
    list(REMOVE_DUPLICATES switches)
    get_cmake_property(variables CACHE_VARIABLES)
    list(FILTER variables INCLUDE REGEX "^(GGML|SWARM)_")
    foreach(variable IN LISTS variables)
        get_property(help CACHE "${variable}" PROPERTY HELPSTRING)
        if(variable IN_LIST known OR NOT help STREQUAL "No help, variable specified on the command line.")
            continue()
        endif()
        set(similar "")
        set(start "${variable}")
        while(NOT similar AND start MATCHES "_.")
            set(similar "${switches}")
            list(FILTER similar INCLUDE REGEX "^${start}")
            string(REGEX REPLACE ".$" "" start "${start}")
        endwhile()
        list(JOIN similar ", " similar)
        message(FATAL_ERROR "swarm-node: neither swarm-node nor this llama.cpp has a build switch ${variable}; "
                            "the most similar are: ${similar}")
    endforeach()
endfunction()

swarm_refuse_unknown_switches()

set(BUILD_SHARED_LIBS ON)

# Two busy OpenMP pools on one machine slow each other down a hundredfold; ggml's own pool can wait
# without spinning.
set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
set(GGML_RPC ${SWARM_TOOLS} CACHE BOOL "" FORCE)
# Ours is in CMakeLists.txt, with a switch.
set(GGML_CCACHE OFF CACHE BOOL "" FORCE)
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
    file(GLOB_RECURSE swarm_id_sources
         "${SWARM_LLAMA_CPP_SOURCE}/ggml/include/*.h" "${SWARM_LLAMA_CPP_SOURCE}/ggml/src/*.[ch]*")
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
    if(name MATCHES "^GGML_(CUDA|HIP|VULKAN|METAL|SYCL|OPENCL|MUSA|CANN|BLAS|NATIVE|CPU_ALL_VARIANTS|CPU_ARM_ARCH|SSE42|AVX|AVX2|AVX512|AVX_VNNI|AVX512_[A-Z0-9]+|FMA|F16C|BMI2|OPENMP|LLAMAFILE)$")
        get_property(swarm_value CACHE "${name}" PROPERTY VALUE)
        string(APPEND swarm_id_text ";${name}=${swarm_value}")
    endif()
endforeach()
string(APPEND swarm_id_text ";${CMAKE_CXX_COMPILER_ID}-${CMAKE_CXX_COMPILER_VERSION};${CMAKE_SYSTEM_PROCESSOR}"
                            ";${CMAKE_BUILD_TYPE}")
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
