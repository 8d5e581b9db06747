#!/usr/bin/env bash
# A recipe of tinker-cookbook, unmodified, on a server of siirl on CPU: bash examples/serve/run.sh NAME [recipe's key=value ...]
# NAME: supervised, rl, preference, distillation or multi_agent; job: what rl trains, as a job of siirl without a server.
# SERVE_DIR (outputs/serve) holds inputs and results. The client is in .venv/tinker: make .venv/.tinker, or set CLIENT to a Python.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
CLIENT=$(realpath -s "${CLIENT:-.venv/tinker/bin/python}")
NAME=${1:?name a recipe: supervised, rl, preference, distillation or multi_agent; or job}
shift
OUT=${SERVE_DIR:-outputs/serve}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the models are so small that threads wait for each other longer than they compute
if [[ ! -e $OUT/tangqiaoyu ]]; then # what is written last
  "$PYTHON" examples/serve/prepare.py --out "$OUT"
fi
OUT=$(realpath "$OUT")
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export HF_DATASETS_CACHE=$OUT/cache # of data sets that are folders here
exact=(
  trainer.device=cpu
  actor_rollout_ref.rollout.dtype=float32
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32
)
if [[ $NAME == job ]]; then
  exec "$PYTHON" -m siirl.main_dag "${exact[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    data.train_files="$OUT/train.parquet" \
    data.val_files="$OUT/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=120 \
    data.max_response_length=1 \
    custom_reward_function.path=examples/serve/reward.py \
    actor_rollout_ref.model.path="$OUT/words" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr=3e-3 \
    "actor_rollout_ref.actor.optim.betas=[0.9,0.95]" \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=16 \
    trainer.n_gpus_per_node=1 \
    trainer.total_training_steps=40 \
    trainer.val_before_train=False \
    trainer.test_freq=-1 \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    trainer.overwrite=true \
    trainer.output_dir="$OUT/job" "$@"
fi

model=letters longest=(1536 512) keys=(renderer_name=role_colon behavior_if_log_dir_exists=delete "log_path=$OUT/$NAME")
each=(eval_every=0 save_every=0)
case $NAME in
  supervised) recipe=chat_sl.train keys+=(dataset=chat.jsonl learning_rate=3e-3 batch_size=16 max_length=256 lora_rank=8 max_steps=12 "${each[@]}") ;;
  rl)
    model=words longest=(120 8) recipe=math_rl.train
    keys+=(env=gsm8k loss_fn=importance_sampling group_size=16 groups_per_batch=16 max_tokens=1 learning_rate=3e-3)
    keys+=(lora_rank=32 max_steps=40 "${each[@]}")
    ;;
  preference) recipe=preference.dpo.train keys+=(dataset=hhh learning_rate=1e-3 batch_size=16 max_length=256 max_steps=6) ;;
  distillation)
    recipe=distillation.on_policy_distillation
    keys+=(teacher_model=letters dataset=deepmath lora_rank=8 groups_per_batch=8 group_size=2 max_tokens=8 learning_rate=1e-3)
    keys+=(max_steps=4 "${each[@]}")
    if [[ -f $OUT/supervised/checkpoints.jsonl ]]; then # what supervised has trained is the teacher
      teacher=$(sed -n 's/.*"sampler_path": "\([^"]*\)".*/\1/p' "$OUT/supervised/checkpoints.jsonl" | tail -1)
      keys+=("teacher_checkpoint=$teacher")
    fi
    ;;
  multi_agent)
    recipe=multiplayer_rl.text_arena.train
    keys+=(batch_size=4 num_train_datapoints=16 num_test_datapoints=4 test_opponent=random max_tokens=12 max_steps=2 "${each[@]}")
    ;;
  *)
    echo "run.sh: unknown recipe $NAME: name one of supervised, rl, preference, distillation, multi_agent; or job" >&2
    exit 2
    ;;
esac
[[ -x $CLIENT ]] || { echo "run.sh: $CLIENT is not there: make .venv/.tinker, or set CLIENT to a Python with tinker-cookbook" >&2; exit 2; }

cd "$OUT" # the client takes the model's path for its name, and data sets' names for paths
client=$OUT/server_$model/service/client.json
rm -f "$client"
PYTHONPATH=$OLDPWD "$PYTHON" -m siirl.cli serve "${exact[@]}" actor_rollout_ref.model.path=$model service.address=127.0.0.1:0 \
  data.max_prompt_length="${longest[0]}" data.max_response_length="${longest[1]}" \
  trainer.output_dir="$OUT/server_$model" trainer.overwrite=true &> "server_$model.log" &
server=$!
trap 'kill $server 2> /dev/null; wait $server || true' EXIT
until [[ -f $client ]]; do
  kill -0 $server 2> /dev/null || { cat "server_$model.log" >&2; exit 1; }
  sleep 0.5
done
read -r TINKER_BASE_URL TINKER_API_KEY < <("$PYTHON" -c "import json; told = json.load(open('$client')); print(told['base_url'], told['token'])")
export TINKER_BASE_URL TINKER_API_KEY
"$CLIENT" -m tinker_cookbook.recipes."$recipe" model_name=$model "${keys[@]}" "$@"
echo "results: $OUT/$NAME/metrics.jsonl; the server's: $OUT/server_$model"
