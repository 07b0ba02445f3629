# Makes the build bearable: llama.cpp's sources stay as they are, and so do ggml's options and with them every result,
# but what is not on the path of a token is optimised less, and files are compiled together.
#
# Included before llama.cpp is added; swarm_shorten_compilation() is called after it. Everything is by name, and only
# where the name exists: another version of llama.cpp is built file by file.
#
# Processor seconds (gcc 12, x86-64, two busy cores):
#   together instead of file by file      llama-common 124 -> 36, libllama 160 -> 51, mtmd 48 -> 9, server 54 -> 22
#   -O3, -O1, -Og                         common/arg.cpp 10.3, 6.1, 4.6; all of tools/server in one: -, 20.4, 13.6
#   gcc's memory (below)                  half of tools/server in one: 10.9 -> 8.6
# A precompiled header was not tried: in this version of llama.cpp only few files include nlohmann/json.hpp.

set(SWARM_UNITY AUTO CACHE STRING
    "compile files of llama.cpp together: ON, OFF, or AUTO, which is for the version whose names do not collide")

# gcc tidies up its memory each time it has doubled, from 128 MiB on: a fifth of a large file's compilation. Here from
# 512 MiB on, less where that is more than half of the machine's memory in all jobs together.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    cmake_host_system_information(RESULT swarm_memory QUERY TOTAL_PHYSICAL_MEMORY)
    cmake_host_system_information(RESULT swarm_cores QUERY NUMBER_OF_LOGICAL_CORES)
    math(EXPR swarm_heap "${swarm_memory} * 512 / (${swarm_cores} + 2)")
    if(swarm_heap GREATER 524288)
        set(swarm_heap 524288)
    endif()
    if(swarm_heap GREATER 131072)
        add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param ggc-min-heapsize=${swarm_heap}>")
    endif()
endif()

# Only for the build type that means -O3: who debugs chooses for himself. -Og is what compiles fastest of the levels
# that are not -O0: two thirds of -O1's time.
set(SWARM_O3 "$<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU,Clang,AppleClang>>:-O3>")
set(SWARM_O1 "$<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU,Clang,AppleClang>>:-O1>")
set(SWARM_OG "$<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU,Clang,AppleClang>>:-Og>")

# swarm_compile(TARGET LEVEL [TOGETHER COUNT] [ONLY REGEX] [APART REGEX]): the level of optimisation of the target's
# C++ files whose path in its folder matches ONLY (default: all). With TOGETHER they are compiled in COUNT groups, but
# for those that match APART, whose names collide with others'. Not in one group: each needs memory like the largest
# single file (0.6 to 1 GB), and there is something left to do side by side.
function(swarm_compile target level)
    cmake_parse_arguments(PARSE_ARGV 2 arg "" "TOGETHER;ONLY;APART" "")
    if(NOT TARGET ${target})
        return()
    endif()
    get_target_property(sources ${target} SOURCES)
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(binary_folder ${target} BINARY_DIR)
    list(TRANSFORM sources REPLACE "^${folder}/" "")
    list(FILTER sources INCLUDE REGEX "\\.cpp$")
    if(arg_ONLY)
        list(FILTER sources INCLUDE REGEX "${arg_ONLY}")
    endif()
    set(together "")
    if(arg_TOGETHER AND (SWARM_UNITY STREQUAL AUTO AND SWARM_PINNED_SOURCE OR SWARM_UNITY STREQUAL ON))
        set(together "${sources}")
        if(arg_APART)
            list(FILTER together EXCLUDE REGEX "${arg_APART}")
        endif()
        list(REMOVE_ITEM sources ${together})
    endif()
    foreach(source IN LISTS sources)
        set_source_files_properties("${folder}/${source}" TARGET_DIRECTORY ${target}
            PROPERTIES COMPILE_OPTIONS "${level}")
    endforeach()
    if(NOT together)
        return()
    endif()
    get_property(first GLOBAL PROPERTY SWARM_GROUPS_OF_${target})
    if(NOT first)
        set(first 0)
    endif()
    list(LENGTH together length)
    set(number 0)
    foreach(source IN LISTS together)
        math(EXPR group "${first} + ${number} * ${arg_TOGETHER} / ${length}")
        math(EXPR number "${number} + 1")
        set_source_files_properties("${folder}/${source}" TARGET_DIRECTORY ${target}
            PROPERTIES UNITY_GROUP "${group}" SKIP_UNITY_BUILD_INCLUSION OFF)
        # CMake leaves files with options of their own out of the groups, but takes options of the group's file.
        set_property(SOURCE "${folder}/${source}" TARGET_DIRECTORY ${target} PROPERTY COMPILE_OPTIONS)
        set_source_files_properties("${binary_folder}/CMakeFiles/${target}.dir/Unity/unity_${group}_cxx.cxx"
            TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "${level}")
    endforeach()
    math(EXPR first "${first} + ${arg_TOGETHER}")
    set_property(GLOBAL PROPERTY SWARM_GROUPS_OF_${target} ${first})
    # Each of llama.cpp's jinja files defines FILENAME.
    set_target_properties(${target} PROPERTIES
        UNITY_BUILD ON UNITY_BUILD_MODE GROUP UNITY_BUILD_CODE_AFTER_INCLUDE "#undef FILENAME")
endfunction()

function(swarm_shorten_compilation)
    # What looks at every logit or cell of the cache stays at -O3; what only puts graphs together, or loads a
    # model, does not need it: to decode 3 x 128 tokens of the demo's model took 2.5 s before and after.
    set(loading "^llama(|-adapter|-arch|-chat|-io|-mmap|-model|-model-loader|-model-saver|-quant)\\.cpp$")
    swarm_compile(llama "${SWARM_O3}" TOGETHER 4 ONLY "^(llama|unicode)[^/]*$" APART "-dsv4|${loading}")
    swarm_compile(llama "${SWARM_OG}" TOGETHER 1 ONLY "${loading}")
    swarm_compile(llama "${SWARM_OG}" TOGETHER 3 ONLY "^models/" APART "/(deepseek4|glm5-next)\\.")
    # A request's or a word's work: chat templates and their parsers, JSON, the loop around the decoding of a batch.
    # A start's: arguments, what kind of template a model has, downloads.
    set(starting "^(arg|chat-auto|chat-diff|console|debug|download|fit|hf-cache|imatrix-loader|json-schema|llguidance)|"
                 "^(ngram|parsers/|preset|speculative|subproc)")
    list(JOIN starting "" starting)
    swarm_compile(llama-common "${SWARM_O1}" TOGETHER 2 APART "^(sampling|json|jinja/value)\\.cpp$|${starting}")
    swarm_compile(llama-common "${SWARM_OG}" TOGETHER 2 ONLY "${starting}")
    swarm_compile(llama-common "${SWARM_O3}" ONLY "^sampling\\.cpp$")
    set(starting "^server-(mcp|schema|tools)")
    swarm_compile(server-context "${SWARM_O1}" TOGETHER 1 APART "${starting}")
    swarm_compile(server-context "${SWARM_OG}" TOGETHER 1 ONLY "${starting}")
    # A start's, or a connection's.
    swarm_compile(llama-server-impl "${SWARM_OG}" TOGETHER 1)
    swarm_compile(cpp-httplib "${SWARM_OG}")
    swarm_compile(mtmd "${SWARM_OG}" TOGETHER 2 APART "mtmd-helper")
    # The tests' tools.
    foreach(target llama-bench-impl llama-quantize-impl llama-gguf-split ggml-rpc-server)
        swarm_compile(${target} "${SWARM_OG}")
    endforeach()

    # The tools' RPC backend is announced to all that uses ggml, by a definition that only ggml's registry reads: every
    # file would be compiled a second time for it, where the demo is there already.
    if(TARGET ggml-rpc)
        foreach(property COMPILE_DEFINITIONS INTERFACE_COMPILE_DEFINITIONS)
            get_target_property(definitions ggml ${property})
            list(REMOVE_ITEM definitions GGML_USE_RPC)
            set_target_properties(ggml PROPERTIES ${property} "${definitions}")
        endforeach()
        get_target_property(folder ggml SOURCE_DIR)
        set_source_files_properties("${folder}/ggml-backend-reg.cpp" TARGET_DIRECTORY ggml
            PROPERTIES COMPILE_DEFINITIONS GGML_USE_RPC)
    endif()
endfunction()
