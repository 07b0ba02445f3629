# Own library names. The dynamic linker takes two libraries with one soname for the same library, so a
# process that holds another package's libggml would silently get that one instead of ours.

function(swarm_own_names directory)
    get_property(targets DIRECTORY "${directory}" PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
        get_target_property(type ${target} TYPE)
        if(type STREQUAL "SHARED_LIBRARY")
            # No version suffix: wheels hold no symbolic links.
            set_target_properties(${target} PROPERTIES OUTPUT_NAME "swarm-${target}" VERSION "" SOVERSION "")
            set_property(TARGET ${target} PROPERTY VERSION)
            set_property(TARGET ${target} PROPERTY SOVERSION)
            set_property(GLOBAL APPEND PROPERTY SWARM_SHARED_LIBRARIES ${target})
            if(NOT APPLE AND NOT WIN32)
                # Calls inside a library stay inside it, whatever else the process has loaded.
                target_link_options(${target} PRIVATE "LINKER:-Bsymbolic")
            endif()
        endif()
    endforeach()
    get_property(children DIRECTORY "${directory}" PROPERTY SUBDIRECTORIES)
    foreach(child IN LISTS children)
        swarm_own_names("${child}")
    endforeach()
endfunction()

swarm_own_names("${SWARM_LLAMA_CPP_SOURCE}")
