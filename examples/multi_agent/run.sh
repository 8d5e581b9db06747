#!/usr/bin/env bash
# Train an example of several agents on CPU, from scratch: bash examples/multi_agent/run.sh NAME [alone] [key=value ...]
# NAME: reasoner_actor, planner_worker, self_play, league, solver_verifier, debate or tree. alone: the agent that answers hears nothing
# from the other one; of tree: as many episodes, none of which branches; of league: plain self-play.
# MULTI_AGENT_DIR (outputs/multi_agent) holds inputs and results, SEED (0) draws models, data and samples.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
HERE=examples/multi_agent
NAME=${1:?name an example: reasoner_actor, planner_worker, self_play, league, solver_verifier, debate or tree}
shift
RUN=team
if [[ ${1-} == alone ]]; then RUN=alone; shift; fi
SEED=${SEED:-0}
TASKS=$NAME
case $NAME in solver_verifier | debate) TASKS=numbers ;; esac
OUT=${MULTI_AGENT_DIR:-outputs/multi_agent}/${TASKS}_$SEED

advantages=(algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False)
keys=() # what differs from the list at the end
hears=
case $NAME in
  reasoner_actor)
    hears=actor
    advantages=(algorithm.adv_estimator=gae_marft algorithm.lam=0.95)
    keys+=(
      actor_rollout_ref.actor.entropy_coeff=0.2 # advantages have deviation 1
      critic.optim.lr=1e-3
      critic.use_dynamic_bsz=True
      critic.model.enable_gradient_checkpointing=False
      critic.model.fsdp_config.mixed_precision.param_dtype=float32
      actor_rollout_ref.rollout.n=8
      dag.node_config.world.env_path=$HERE/games.py:Doors
      dag.node_config.actor.model.path="$OUT/model_1"
    )
    ;;
  planner_worker)
    hears=worker
    keys+=(
      actor_rollout_ref.actor.entropy_coeff=0.04
      data.train_batch_size=12
      actor_rollout_ref.rollout.n=10
      dag.node_config.worker.model.path="$OUT/model_1"
      dag.node_config.worker.rollout.multi_turn.tool_config_path=$HERE/tools.yaml
      dag.node_config.worker.rollout.multi_turn.max_assistant_turns=2
      dag.node_config.worker.rollout.agent.process_path=$HERE/views.py
      dag.node_config.worker.rollout.agent.pre_process_kwargs.request=False
    )
    ;;
  self_play)
    if [[ $RUN == alone ]]; then echo "run.sh: $NAME has one policy: nobody is alone" >&2; exit 2; fi
    keys+=(
      data.train_batch_size=8
      actor_rollout_ref.actor.optim.lr=5e-4
      actor_rollout_ref.actor.entropy_coeff=0.01
      dag.node_config.game.env_path=$HERE/games.py:Nim
    )
    ;;
  tree)
    keys+=(
      data.train_batch_size=8
      dag.node_config.world.env_path=$HERE/games.py:Luck
    )
    if [[ $RUN == alone ]]; then
      keys+=(dag.node_config.player.rollout.agent.branch.candidates=1 dag.node_config.advantage_player.credit.group_by='[task,agent,turn]')
    else
      keys+=(actor_rollout_ref.rollout.n=4)
    fi
    ;;
  league)
    keys+=(
      data.train_batch_size=8
      data.max_response_length=4
      actor_rollout_ref.actor.optim.lr=5e-4
      actor_rollout_ref.actor.entropy_coeff=0.4 # a player that has ruled a word out never tries it again
      actor_rollout_ref.rollout.val_kwargs.do_sample=True
      actor_rollout_ref.rollout.val_kwargs.temperature=1.0
      trainer.total_training_steps=100
      dag.node_config.game.env_path=$HERE/games.py:RockPaperScissors
    )
    if [[ $RUN == alone ]]; then
      keys+=(dag.node_config.opponent='{rollout.agent.pool.policy: null, rollout.agent.share_instance: 0}')
    else
      keys+=(dag.node_config.opponent.rollout.agent.pool.every_steps=4)
    fi
    ;;
  solver_verifier | debate)
    keys+=(trainer.total_training_steps=60)
    if [[ $RUN == alone ]]; then # one agent in all, which sees what the solver sees
      keys+=(
        dag.workflow_path=null
        data.max_response_length=1
        custom_reward_function.path=$HERE/solver_verifier.py
        custom_reward_function.name=alone
      )
    else
      RUN=$NAME # both are in one folder
      keys+=(
        data.max_response_length=8
        actor_rollout_ref.rollout.agent.process_path=$HERE/$NAME.py
        custom_reward_function.path=$HERE/$NAME.py
      )
    fi
    ;;
  *)
    echo "run.sh: unknown example $NAME: name one of reasoner_actor, planner_worker, self_play, league, solver_verifier, debate, tree" >&2
    exit 2
    ;;
esac
if [[ $RUN == alone && -n $hears ]]; then
  keys+=(
    dag.node_config.$hears.rollout.agent.process_path=$HERE/views.py
    dag.node_config.$hears.rollout.agent.pre_process_kwargs.others=False
  )
fi
if [[ ! -e $OUT/test.parquet ]]; then
  "$PYTHON" -m examples.multi_agent.prepare "$TASKS" --out "$OUT" --seed "$SEED"
fi
exec "$PYTHON" -m siirl.main_dag \
  dag.workflow_path=dag_templates/"$NAME".yaml \
  "${advantages[@]}" \
  data.train_files="$OUT/train.parquet" \
  data.val_files="$OUT/test.parquet" \
  data.train_batch_size=16 \
  data.max_prompt_length=24 \
  data.max_response_length=32 \
  actor_rollout_ref.model.path="$OUT/model_0" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.entropy_coeff=0.02 \
  actor_rollout_ref.actor.ppo_mini_batch_size='${data.train_batch_size}' \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.agent.max_turn_tokens=1 \
  custom_reward_function.path=$HERE/reward.py \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.seed="$SEED" \
  trainer.total_training_steps=80 \
  trainer.test_freq=10 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.overwrite=true \
  trainer.project_name=siirl \
  trainer.experiment_name="${TASKS}_$RUN" \
  trainer.output_dir="$OUT/$RUN" \
  "${keys[@]}" "$@"
