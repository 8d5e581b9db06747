# shellcheck shell=bash
# What the scripts in examples/ share: where things lie, and the start on one machine or on several.
#
# A script sets MODEL_NAME, sources this file and ends with `launch key=value ... "$@"`. The same command is run
# on every machine. Set from outside:
#
#   MODEL_PATH, TRAIN_DATA_PATH, TEST_DATA_PATH    what to train on [below $HOME/data]
#   OUTPUT_DIR        everything that the run writes [$HOME/siirl/...]
#   N_GPUS_PER_NODE   GPUs of each machine [8]
#   PET_NNODES, PET_NODE_RANK, MASTER_ADDR    machines [1], this one's number [0], the address of number 0
#   RAY_PORT [6379], NODE_WAIT_S [600]        port of the Ray head, longest wait for the other machines
#   PYTHON [python3]                          the Python that siirl is installed in
#   DRY_RUN=1                                 check the settings and start nothing

set -euo pipefail

PYTHON=${PYTHON:-python3}
DATASET=${DATASET:-gsm8k}
ALG=${ALG:-grpo}
TRAIN_DATA_PATH=${TRAIN_DATA_PATH:-$HOME/data/$DATASET/train.parquet}
TEST_DATA_PATH=${TEST_DATA_PATH:-$HOME/data/$DATASET/test.parquet}
MODEL_PATH=${MODEL_PATH:-$HOME/data/models/$MODEL_NAME}
N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-8}
MACHINES=${PET_NNODES:-1} # MIN:MAX: also with MIN of them
NNODES=${MACHINES##*:}
NODE_RANK=${PET_NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
RAY_PORT=${RAY_PORT:-6379}
NODE_WAIT_S=${NODE_WAIT_S:-600}
EXPERIMENT=${MODEL_NAME}_${ALG}_${DATASET}_${NNODES}nodes
OUTPUT_DIR=${OUTPUT_DIR:-$HOME/siirl/$EXPERIMENT}
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-0}

# launch key=value ...: the keys of the script and of its user, the later one counts.
launch() {
  local settings=(
    algorithm.adv_estimator="$ALG"
    data.train_files="$TRAIN_DATA_PATH"
    data.val_files="$TEST_DATA_PATH"
    actor_rollout_ref.model.path="$MODEL_PATH"
    trainer.nnodes="$MACHINES"
    trainer.n_gpus_per_node="$N_GPUS_PER_NODE"
    trainer.project_name="siirl_${DATASET}_${ALG}"
    trainer.experiment_name="$EXPERIMENT"
    trainer.output_dir="$OUTPUT_DIR"
  )
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec "$PYTHON" -m siirl.cli check --elsewhere "${settings[@]}" "$@"
  elif ((NNODES == 1)); then
    exec "$PYTHON" -m siirl.main_dag "${settings[@]}" "$@"
  fi
  # A head asks for Ray's token where its machine has one; whoever joins it shows one only if told to.
  [[ -n ${RAY_AUTH_MODE:-} || ! -s $HOME/.ray/auth_token ]] || export RAY_AUTH_MODE=token
  if ((NODE_RANK == 0)); then
    lead "${settings[@]}" "$@"
  else
    follow
  fi
}

# The first machine: a Ray head, and the run, which waits for the other machines. Ray ends with the run.
lead() {
  start_ray --head --port="$RAY_PORT" --include-dashboard=false
  (
    while kill -0 $$ 2>/dev/null; do sleep 1; done
    kill -TERM "$RAY_PID"
  ) &
  wait_for_head localhost 120
  exec "$PYTHON" -m siirl.main_dag trainer.launcher=ray ray_init.address="localhost:$RAY_PORT" \
    ray_init.wait_s="$NODE_WAIT_S" "$@"
}

# Another machine: joins the Ray cluster and stays until the head has ended.
follow() {
  wait_for_head "$MASTER_ADDR" "$NODE_WAIT_S"
  start_ray --address="$MASTER_ADDR:$RAY_PORT"
  trap 'kill -TERM "$RAY_PID"; exit 143' TERM INT
  local missed=0
  while ((missed < 3)); do
    sleep 1 &
    wait $!
    if ! kill -0 "$RAY_PID" 2>/dev/null && answers "$MASTER_ADDR"; then
      echo "launch.sh: Ray ended on this machine while the head goes on" >&2
      exit 1
    fi
    if answers "$MASTER_ADDR"; then missed=0; else missed=$((missed + 1)); fi
  done
  echo "launch.sh: the head at $MASTER_ADDR:$RAY_PORT has ended"
  kill -TERM "$RAY_PID" 2>/dev/null || true
  wait "$RAY_PID" || true
}

# start_ray OPTION...: Ray on this machine, as a child of this shell; its CPUs are counted, but not bound.
start_ray() {
  local cpus
  cpus=$(nproc)
  "$PYTHON" -m ray.scripts.scripts start "$@" --num-gpus="$N_GPUS_PER_NODE" \
    --num-cpus=$((cpus > N_GPUS_PER_NODE ? cpus : N_GPUS_PER_NODE)) --disable-usage-stats --block &
  RAY_PID=$!
}

# wait_for_head HOST SECONDS
wait_for_head() {
  local deadline=$((SECONDS + $2))
  until answers "$1"; do
    if ((SECONDS >= deadline)); then
      echo "launch.sh: no Ray head answered at $1:$RAY_PORT within $2 s. Is machine 0 (PET_NODE_RANK=0) started," \
        "and MASTER_ADDR right?" >&2
      exit 1
    fi
    if [[ -n ${RAY_PID:-} ]] && ! kill -0 "$RAY_PID" 2>/dev/null; then
      echo "launch.sh: Ray did not start on this machine (see above). Is port $RAY_PORT taken? Set RAY_PORT." >&2
      exit 1
    fi
    sleep 1
  done
}

# answers HOST: whether something listens at the head's port.
answers() {
  timeout 5 bash -c "exec 3<>/dev/tcp/$1/$RAY_PORT" 2>/dev/null
}
