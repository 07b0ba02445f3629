# Read by scripts/equivalence and scripts/mixed-swarm, after build_common.sh: builds for several backends, named on the command line.
#
# BACKEND: native (this machine's CPU), x86-baseline, x86-sse42, x86-avx2, arm64, arm64-dotprod, arm64-i8mm (under qemu), vulkan
# (Mesa's software driver), cuda.

# Of `[--folder DIR] [BACKEND …] [-- OPTION …]`: sets $folder, $arguments (the backends) and $options.
take_backends() {
    local before=()
    options=()
    while [ $# -gt 0 ]; do
        [ "$1" != -- ] || { shift; options=("$@"); break; }
        before+=("$1")
        shift
    done
    take_folder "${before[@]+"${before[@]}"}"
}

# Makes the builds of $arguments, and native's; sets $native to a Python of it, and $servers to `--server NAME=PYTHON@DEVICE …`.
build_backends() {
    local backend device python scripts=$root/scripts
    for backend in "${arguments[@]}"; do
        case $backend in
            native | x86-baseline | x86-sse42 | x86-avx2 | arm64 | arm64-dotprod | arm64-i8mm | vulkan | cuda) ;;
            *) fail "there is no backend $backend; see scripts/build_backends.sh" ;;
        esac
    done

    native=$("$scripts/build-native" --folder "$folder")
    servers=(--server "native=$native@CPU")
    for backend in "${arguments[@]}"; do
        device=CPU
        case $backend in
            native) continue ;;
            x86-*) python=$("$scripts/build-x86" "${backend#x86-}" --folder "$folder") ;;
            arm64) python=$("$scripts/build-arm64" --folder "$folder") ;;
            arm64-dotprod) python=$("$scripts/build-arm64" --arch armv8.2-a+dotprod --folder "$folder") ;;
            arm64-i8mm) python=$("$scripts/build-arm64" --arch armv8.6-a+i8mm --folder "$folder") ;;
            vulkan) python=$("$scripts/build-vulkan" --folder "$folder") device=Vulkan0 ;;
            cuda) python=$("$scripts/build-cuda" --folder "$folder") device=CUDA0 ;;
        esac
        servers+=(--server "$backend=$python@$device")
    done
}
