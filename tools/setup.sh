# Sourced by ./run and ./test: system packages, PyTorch and the build, each done once.
#
# A step that stands is recognised and skipped; one that was interrupted is recognised too and done
# again. Nothing is recorded before it has succeeded. After `set_up` the variables python (the interpreter
# that has PyTorch) and torch_dir (its torch folder) are set.

torch_requirement="torch==2.13.0"   # installed where no PyTorch of at least torch_minimum is found
torch_minimum="2.11"
python_requirements=(numpy safetensors pytest pytest-xdist transformers mypy)
apt_packages=(g++ cmake ninja-build ccache pkg-config libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libgtest-dev
  libcpp-httplib-dev libpng-dev libjpeg-dev libpcre2-dev libutf8proc-dev libsentencepiece-dev)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
logs=$root/build/logs
ticker=

say() { printf '== %s\n' "$*"; }

stop_ticker() {
  [[ -z $ticker ]] || kill "$ticker" 2>/dev/null || true
  ticker=
}
trap stop_ticker EXIT
exec 3>&2  # a trap may run while stderr is a log
trap 'stop_ticker; echo "interrupted; run it again to go on." >&3; exit 130' INT TERM

# Says that NAME is still going on whenever nothing has been shown for a while. MODE shown: LOG is on the
# screen as well.
start_ticker() {
  local name=$1 log=$2 mode=$3 started=$SECONDS
  (
    trap - EXIT INT TERM
    shown=$(date +%s)
    while sleep 4 >/dev/null 2>&1; do
      now=$(date +%s)
      if [[ $mode == shown ]]; then
        written=$(stat -c %Y "$log")
        ((shown >= written)) || shown=$written
      fi
      ((now - shown >= 12)) || continue
      shown=$now
      last=$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-100)
      printf '   ... %s: %d s%s\n' "$name" $((SECONDS - started)) "${last:+ ($last)}"
    done
  ) &
  ticker=$!
}

# step NAME quiet|shown COMMAND...: runs a step of the set-up, its output in a log and, when shown, on
# the screen. A failure names the step and its log.
step() {
  local name=$1 mode=$2 log status=0 started=$SECONDS
  shift 2
  mkdir -p "$logs"
  log=$logs/$(tr -cs 'a-zA-Z0-9\n' '-' <<<"$name" | sed 's/-*$//').log
  say "$name"
  : >"$log"
  start_ticker "$name" "$log" "$mode"
  if [[ $mode == shown ]]; then
    "$@" 2>&1 | tee "$log" || status=$?
  else
    "$@" >"$log" 2>&1 </dev/null || status=$?
  fi
  stop_ticker
  if ((status != 0)); then
    [[ $mode == shown ]] || tail -n 20 "$log" >&2
    echo "failed at: $name (exit code $status); log: ${log#"$root"/}" >&2
    return $status
  fi
  ((SECONDS - started < 5)) || say "$name: done in $((SECONDS - started)) s"
}

missing_packages() {
  local package
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || echo "$package"
  done
}

install_packages() {
  export DEBIAN_FRONTEND=noninteractive
  dpkg --configure -a && apt-get update && apt-get install -y --no-install-recommends "$@"
}

# Debian packages; elsewhere CMake says what it does not find.
set_up_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    return 0
  fi
  local missing
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    echo "these Debian packages are missing: ${missing[*]}; install them as root with" >&2
    echo "    apt-get install ${missing[*]}" >&2
    return 1
  fi
  step "install packages (apt): ${missing[*]}" quiet install_packages "${missing[@]}"
}

# Prints the torch folder when interpreter $1 has everything; otherwise nothing. "torch" as $2 asks for
# PyTorch alone.
torch_folder() {
  "$1" - "$torch_minimum" "$2" "${python_requirements[@]}" 2>/dev/null <<'PYTHON'
import importlib.metadata, os, re, sys
minimum, what, *others = sys.argv[1:]
# By the names of pip's packages: the module of pytest-xdist is called otherwise.
for name in others if what == "all" else []:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit()
import torch
version = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
folder = os.path.dirname(torch.__file__)
if version >= tuple(map(int, minimum.split("."))) and os.path.exists(folder + "/lib/libtorch_cpu.so"):
    print(folder)
PYTHON
}

# Makes .venv, on top of the system's PyTorch where $1 names its folder. Until it is complete the file
# .venv/headloom says "unfinished".
make_venv() {
  local folder=$1 packages=("${python_requirements[@]}")
  mkdir .venv && echo unfinished >.venv/headloom || return
  if [[ -n $folder ]]; then
    python3 -m venv --system-site-packages .venv || return
    # When python3 is itself a virtual environment its packages are not the system's.
    local site
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
    dirname "$folder" >"$site/torch.pth"
  else
    python3 -m venv .venv || return
    packages+=("$torch_requirement")
  fi
  .venv/bin/python -m pip install --progress-bar off "${packages[@]}" || return
  .venv/bin/python -c "import torch, numpy, safetensors, pytest, transformers" || return
  echo complete >.venv/headloom
}

set_up_python() {
  command -v python3 >/dev/null || {
    echo "python3 is missing; Python 3.10 or newer is needed." >&2
    return 1
  }
  if [[ -d .venv ]]; then
    python=$root/.venv/bin/python
    if [[ $(cat .venv/headloom 2>/dev/null) != unfinished ]]; then
      torch_dir=$(torch_folder "$python" all) || true
      [[ -z $torch_dir ]] || return 0
      [[ -e .venv/headloom || -z $(ls -A .venv) ]] || {
        echo "the folder .venv was not made by this script and has no PyTorch of $torch_minimum or newer" \
          "with ${python_requirements[*]}: install them there, or remove it." >&2
        return 1
      }
    fi
    say "the folder .venv is not complete: making it anew"
    # The mark goes last, so that an interrupted removal is not taken for somebody else's folder.
    echo unfinished >.venv/headloom
    find .venv -mindepth 1 -maxdepth 1 ! -name headloom -exec rm -rf {} +
    rm -rf .venv
  fi
  torch_dir=$(torch_folder python3 all) || true
  if [[ -n $torch_dir ]]; then
    python=$(python3 -c 'import sys; print(sys.executable)')
    return 0
  fi
  python3 -c 'import ensurepip, venv' 2>/dev/null || set_up_packages python3-venv
  local system wanted="${python_requirements[*]}"
  system=$(torch_folder python3 torch) || true
  [[ -n $system ]] || wanted="$torch_requirement $wanted"
  step "install $wanted into .venv (pip)" quiet make_venv "$system"
  python=$root/.venv/bin/python
  torch_dir=$(torch_folder "$python" all)
  [[ -n $torch_dir ]] || {
    echo ".venv is installed, but has no PyTorch of $torch_minimum or newer with ${python_requirements[*]}." >&2
    return 1
  }
}

# What some tests need and nothing else does. Where .venv is not ours they are skipped, with a reason.
set_up_tests() {
  "$python" -c 'import distributed, tensorboard' 2>/dev/null || [[ ! -e .venv/headloom ]] ||
    step "install distributed tensorboard into .venv (pip)" quiet \
      "$python" -m pip install --progress-bar off distributed tensorboard ||
    say "distributed and tensorboard are not there: their tests are skipped"
}

set_up() {
  set_up_packages "${apt_packages[@]}"
  set_up_python
}

configure() {
  # PyTorch may be replaced in its place by one that CMake finds other things in.
  local key stamp=build/configured
  key="$root $python $torch_dir $(cksum <"$torch_dir/version.py")"
  [[ $(cat $stamp 2>/dev/null) == "$key" && -e build/build.ninja ]] && return 0
  rm -f $stamp
  step "configure (cmake)" quiet cmake --fresh -S . -B build -G Ninja -DPython3_EXECUTABLE="$python" \
    -DHEADLOOM_TORCH_DIR="$torch_dir" -DCMAKE_UNITY_BUILD=ON
  echo "$key" >$stamp
}

# The processors that this may use, in a container with a share of them too.
cores() {
  local count quota= period=
  count=$(nproc)
  if [[ -r /sys/fs/cgroup/cpu.max ]]; then
    read -r quota period </sys/fs/cgroup/cpu.max || true
  elif [[ -r /sys/fs/cgroup/cpu/cpu.cfs_quota_us ]]; then # the older control groups
    quota=$(cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us) period=$(cat /sys/fs/cgroup/cpu/cpu.cfs_period_us)
  fi
  if [[ $quota =~ ^[0-9]+$ && $period =~ ^[1-9][0-9]*$ ]]; then
    quota=$(((quota + period - 1) / period))
    ((quota >= count)) || count=$quota
  fi
  echo $((count < 1 ? 1 : count))
}

# One compiler takes up to 2 GB, of what is free here and of what a container may have.
jobs() {
  local count memory limit file
  count=$(cores)
  memory=$(awk '/MemAvailable/ { print int($2 / 2000000) }' /proc/meminfo)
  for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
    limit=$(cat $file 2>/dev/null) || continue
    [[ $limit =~ ^[0-9]{1,17}$ ]] || continue # no limit is a word, or a number without meaning
    limit=$((limit / 2000000000))
    ((limit >= memory)) || memory=$limit
  done
  echo $((memory < 1 ? 1 : memory < count ? memory : count))
}

# build TARGET...
build() {
  configure
  NINJA_STATUS="[%f/%t, %es] " step "build (ninja)" shown ninja -C build -j "$(jobs)" "$@"
}
