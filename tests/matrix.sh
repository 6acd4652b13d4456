#!/bin/sh
# tests/matrix.sh [ROW ...]: the default tests as other processors compute, with other kernels and numbers of threads.
# A row is a set of environment variables; without names all rows run. Every row runs, and the last line names those that
# failed. Each row takes as long as `make test`. A row of kernels that this processor does not have is left out, and said.
# The last results are in tests/README.md.
set -u
cd "$(dirname "$0")/.."

rows="plain haswell zen skylakex laptop oldest three four"

variables() {
    case $1 in
        plain) ;;
        haswell) echo OPENBLAS_CORETYPE=Haswell NPY_DISABLE_CPU_FEATURES="$AVX512" ATEN_CPU_CAPABILITY=avx2 ;;
        zen) echo OPENBLAS_CORETYPE=Zen MKL_CBWR=COMPATIBLE LP_NATIVE_VECTOR_WIDTH=256 ;;
        skylakex) echo OPENBLAS_CORETYPE=SkylakeX ;;
        laptop)
            echo OPENBLAS_CORETYPE=Haswell NPY_DISABLE_CPU_FEATURES="$AVX512" ATEN_CPU_CAPABILITY=avx2 \
                LP_NATIVE_VECTOR_WIDTH=256 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2
            ;;
        oldest) echo OPENBLAS_CORETYPE=Nehalem NPY_DISABLE_CPU_FEATURES=X86_V3 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ;;
        three) echo OMP_NUM_THREADS=3 ;;
        four) echo OMP_NUM_THREADS=4 ATEN_CPU_CAPABILITY=default ;;
        *) return 1 ;;
    esac
}

# The targets of NumPy that need AVX-512; naming them where they are missing is a warning in every process.
AVX512=
if grep -q avx512f /proc/cpuinfo; then
    AVX512="X86_V4,AVX512_ICL,AVX512_SPR"
fi

failed=
for row in ${*:-$rows}; do
    if ! found=$(variables "$row"); then
        echo "error: no row $row: they are $rows" >&2
        exit 2
    fi
    if [ "$row" = skylakex ] && [ -z "$AVX512" ]; then
        echo "row skylakex: left out, this processor has no AVX-512"
        continue
    fi
    echo "row $row: ${found:-as the processor computes}"
    # shellcheck disable=SC2086 # several variables
    env $found make test ARGS=-q || failed="$failed $row"
done
[ -z "$failed" ] || echo "failed:$failed"
[ -z "$failed" ]
