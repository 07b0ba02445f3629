# Read by scripts/build-*: an expert-only build for other hardware, in a folder outside the repository.
#
# Every build gets FOLDER/NAME with `build` (CMake's), `prefix` (what is installed) and `python`: a program that is Python with this
# build on its path, so that `FOLDER/NAME/python -P -m node.expert_server` is an expert server of it.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The same rule as node/paths.py.
if [ -n "${SWARM_CACHE_DIR-}" ]; then cache=$SWARM_CACHE_DIR
elif [ -n "${XDG_CACHE_HOME-}" ]; then cache=$XDG_CACHE_HOME/swarm-node
else cache=$HOME/.cache/swarm-node
fi
folder=$cache/builds

say() { echo "swarm-node: $*" >&2; }

fail() { say "$*"; exit 1; }

# Takes `--folder DIR` off the arguments, into $folder; the others are left in $arguments.
take_folder() {
    arguments=()
    while [ $# -gt 0 ]; do
        case $1 in
            --folder) [ $# -gt 1 ] || fail "--folder needs a folder"; folder=$2; shift 2 ;;
            --folder=*) folder=${1#--folder=}; shift ;;
            *) arguments+=("$1"); shift ;;
        esac
    done
    folder=$(realpath -m -- "$folder")
    case $folder/ in
        "$(realpath "$root")"/*) fail "$folder is in the repository; name a folder elsewhere with --folder" ;;
    esac
    mkdir -p "$folder"
}

# Installs Debian packages, or says which are needed.
install_packages() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $*"
        { apt-get update -qq && apt-get install -y -qq "$@"; } >/dev/null
    else
        fail "these packages are needed: sudo apt-get install $*"
    fi
}

# need PROGRAM PACKAGE …: installs the packages if the program is missing.
need() { command -v "$1" >/dev/null || install_packages "${@:2}"; }

# Runs a command; shows the end of what it wrote only if it fails.
run() {
    local log=$folder/${name:-tools}.log
    "$@" >"$log" 2>&1 || { tail -n 60 "$log" >&2; fail "failed: $* (whole log: $log)"; }
}

# Sets $tools to a Python with this project's dependencies and the build's tools. SWARM_BUILD_PYTHON names one that has them
# already, for machines without a package index.
need_tools() {
    if [ -n "${SWARM_BUILD_PYTHON-}" ]; then
        tools=$SWARM_BUILD_PYTHON
        "$tools" -c 'import aiohttp, cryptography, gguf, msgpack, msgspec, numpy, psutil, pybind11' ||
            fail "$tools (SWARM_BUILD_PYTHON) lacks a package that the build or an expert server needs"
        tool_path=$(dirname "$tools"):$PATH
        return
    fi
    tools=$folder/tools/bin/python
    tool_path=$folder/tools/bin:$PATH
    need g++ g++ python3-venv python3-dev make
    local stamp=$folder/tools/stamp
    if [ "$(cat "$stamp" 2>/dev/null)" != "$(dependencies)" ]; then
        say "installing Python packages into $folder/tools"
        [ -x "$tools" ] || run "${PYTHON:-python3}" -m venv "$folder/tools"
        # shellcheck disable=SC2046
        run "$tools" -m pip install --disable-pip-version-check --progress-bar off cmake ninja pybind11 $(dependencies)
        dependencies >"$stamp"
    fi
}

# The project's dependencies, a line each.
dependencies() {
    "${PYTHON:-python3}" -c 'import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["dependencies"], sep="\n")' "$root/pyproject.toml"
}

# build NAME PYTHON SWITCH …: builds and installs into $folder/NAME/prefix; PYTHON is the one that will load it.
build() {
    local name=$1 python=$2 started=$SECONDS
    shift 2
    say "building $name in $folder/$name"
    local make_program
    make_program=$(PATH=$tool_path command -v ninja) || fail "ninja is missing"
    # Before the configuration, whose Python may be another machine's, without pip. A folder that the caller names is used as it is.
    case " $* ${CMAKE_ARGS-} " in
        *-DSWARM_LLAMA_CPP_DIR=*) ;;
        *) run env PATH="$tool_path" cmake -DPython_EXECUTABLE="$tools" -P "$root/kernels/cmake/llama_cpp.cmake" ;;
    esac
    # CMake refuses a build folder that was made for another checkout.
    local made_for
    made_for=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$folder/$name/build/CMakeCache.txt" 2>/dev/null || true)
    [ -z "$made_for" ] || [ "$made_for" = "$root" ] || rm -rf "$folder/$name/build"
    # shellcheck disable=SC2086
    run env PATH="$tool_path" cmake -S "$root" -B "$folder/$name/build" -G Ninja -DCMAKE_MAKE_PROGRAM="$make_program" \
        -Dpybind11_DIR="$("$tools" -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$python" \
        -DSWARM_ROUTER=OFF "$@" ${CMAKE_ARGS-}
    run env PATH="$tool_path" cmake --build "$folder/$name/build" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
    rm -rf "$folder/$name/prefix"
    run env PATH="$tool_path" cmake --install "$folder/$name/build" --component swarm --prefix "$folder/$name/prefix"
    (cd "$root" && find node gossip kernels -name '*.py' -exec cp --parents -t "$folder/$name/prefix" {} +)
    say "built $name in $((SECONDS - started)) s"
}

# write_program FILE: an executable shell script from stdin; the name appears when it is complete.
write_program() {
    { echo '#!/bin/sh'; cat; } >"$1.new"
    chmod +x "$1.new"
    mv "$1.new" "$1"
}

# Imports the build in its own Python, and prints its devices.
try() {
    "$1" -P -c 'import kernels
print(kernels.build_id(), *(f"{d.name} ({d.type}, {d.description})" for d in kernels.devices()), sep="; ")' ||
        fail "$1 cannot load the build"
}

# host_python NAME [LINE]: writes `python` for a build that this machine's processor runs, tries it, and prints its path.
# LINE is shell that is run before.
host_python() {
    write_program "$folder/$1/python" <<END
${2-}
PYTHONPATH='$folder/$1/prefix' exec '$tools' "\$@"
END
    try "$folder/$1/python" >&2
    echo "$folder/$1/python"
}

# A package manager's folder of its own: to fetch packages of another architecture or release without touching this machine.
# private_apt DIR ARCHITECTURE SOURCES: refreshes its lists; SOURCES are copied into it.
private_apt() {
    local dir=$1 architecture=$2
    shift 2
    mkdir -p "$dir"/etc/apt/{sources.list.d,preferences.d} "$dir"/var/lib/apt/lists/partial "$dir"/var/cache/apt/archives/partial \
        "$dir"/var/lib/dpkg
    : >"$dir/var/lib/dpkg/status"
    rm -f "$dir"/etc/apt/sources.list.d/*
    cp "$@" "$dir/etc/apt/sources.list.d/"
    cat >"$dir/apt.conf" <<END
Dir "$dir";
Dir::State::status "$dir/var/lib/dpkg/status";
Dir::Etc::trusted "/etc/apt/trusted.gpg";
Dir::Etc::trustedparts "/etc/apt/trusted.gpg.d";
APT::Architecture "$architecture";
APT::Architectures "$architecture";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
END
    run env APT_CONFIG="$dir/apt.conf" apt-get -q update
}

# The machine's own sources of packages: those of its distribution, without others that were added.
distribution_sources() {
    local file
    for file in /etc/apt/sources.list.d/{debian,ubuntu}.sources; do
        [ ! -e "$file" ] || { echo "$file"; return; }
    done
    [ -s /etc/apt/sources.list ] || fail "this machine's package sources were not found; name a file of them with --sources"
    echo /etc/apt/sources.list
}
