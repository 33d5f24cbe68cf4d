#!/usr/bin/env bash
# The checks that need an NVIDIA GPU, in under 8 minutes: every kernel against float64, decoding and training speed.
#
#   benchmarks/gpu_check.sh --wheels     with network: fetches what the GPU machine lacks into .wheels/ (13 MiB)
#   benchmarks/gpu_check.sh              on that machine: prints one table last; JSON in $OUT or benchmarks/results/
#   benchmarks/gpu_check.sh --smoke      anywhere: the same at toy sizes, kernels interpreted
#
# The machine needs Python 3.12 on x86-64 and jax >= 0.11 for CUDA with flax, optax, orbax-checkpoint and chex, nothing
# else of requirements.txt and no network. PYTHON names another interpreter than python3. Wheels are unpacked into a
# directory of their own, ahead of site-packages, so that nothing there is touched, may it be read-only or managed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if [[ ${1:-} == --wheels ]]; then
    # With their dependencies, less what is there with jax, flax, optax, orbax-checkpoint and chex; hence --no-deps.
    rm -rf .wheels
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest .wheels \
        --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 \
        pydantic==2.14.4 pydantic_core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 \
        typing_extensions==4.16.0 tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.1 \
        jaxtyping==0.3.11 wadler_lindig==0.1.8 tqdm==4.70.1 \
        grain==0.2.18 array_record==0.8.6 cloudpickle==3.1.3 portpicker==1.6.0 psutil==7.2.2 \
        prometheus_client==0.26.0 attrs==26.1.0 tokenizers==0.23.3 \
        pytest==9.2.0 iniconfig==2.3.1 pluggy==1.7.0 packaging==26.4 pygments==2.21.0
    du -sh .wheels
    exit
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
shopt -s nullglob
wheels=(.wheels/*.whl)
if [[ ${#wheels[@]} == 0 ]] && ! "$python" -c 'import pydantic, tyro, jaxtyping, grain, tokenizers, pytest' 2>/dev/null; then
    echo "error: .wheels/ is empty and packages are missing: run benchmarks/gpu_check.sh --wheels with network" >&2
    exit 2
fi
if [[ ${#wheels[@]} != 0 ]] && ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    echo "error: the wheels are for Python 3.12, $python is $("$python" --version): set PYTHON" >&2
    exit 2
fi
for wheel in "${wheels[@]}"; do
    "$python" -m zipfile -e "$wheel" "$site"
done
PYTHONPATH="$site:$PWD" "$python" benchmarks/gpu_check.py "$@"
