/**
 * The answers of `clawgym view`: what each address gives, as JSON.
 *
 * All addresses are below `/api/`. The parts in capitals are: ID, the `id` of a source; NAME, the `name` of an episode
 * of a run; SEQ, the `seq` of an episode of a pool. All of them are safe in a path as they are.
 *
 * | address                                            | answer                                            |
 * |----------------------------------------------------|---------------------------------------------------|
 * | sources                                            | Sources                                           |
 * | runs/ID                                            | Run                                               |
 * | runs/ID/episodes?EPISODE_QUERY                     | Page<EpisodeLine>                                 |
 * | runs/ID/episodes/NAME                              | Episode                                           |
 * | runs/ID/episodes/NAME/turns?offset&limit           | Page<Step>                                        |
 * | runs/ID/episodes/NAME/tokens?turn                  | Tokens                                            |
 * | runs/ID/pictures/DIGEST                            | a picture (addresses are in Picture.src)          |
 * | compare?a=ID&b=ID                                  | Compare                                           |
 * | training/ID                                        | Training                                          |
 * | pools/ID                                           | Pool                                              |
 * | pools/ID/groups?offset&limit&channel&state         | Page<PoolGroup>                                   |
 * | pools/ID/episodes?POOL_QUERY                       | Page<PoolEpisodeLine>                             |
 * | pools/ID/episodes/SEQ                              | PoolEpisode                                       |
 * | pools/ID/episodes/SEQ/turns?offset&limit           | Page<Step>                                        |
 * | pools/ID/episodes/SEQ/tokens?turn                  | Tokens                                            |
 * | pools/ID/episodes/SEQ/sequences                    | SequenceTree                                      |
 * | pools/ID/pictures/DIGEST                           | a picture                                         |
 * | boards/ID?by                                       | Board                                             |
 * | audits/ID                                          | Audit                                             |
 * | audits/ID/tasks?offset&limit&flaw&q                | Page<AuditTask>                                   |
 * | attacks/ID                                         | Attack                                            |
 * | experiments/ID                                     | Experiment                                        |
 * | online/ID                                          | Online                                            |
 * | online/ID/promote   POST {"version": number}       | Online (only if Sources.writable)                 |
 * | online/ID/rollback  POST {"version": number|null}  | Online (only if Sources.writable)                 |
 * | live                                               | Live                                              |
 * | search?q&source&offset&limit                       | Page<SearchHit>                                   |
 * | events                                             | server-sent events: LiveEvent                     |
 *
 * EPISODE_QUERY: offset, limit (at most 500), sort (a SortKey, with "-" before it: descending), outcome, category,
 * check (name of a check that was not passed), q (text in the transcript, the task's id or the cause).
 * POOL_QUERY: offset, limit, channel, fate, outcome, group, q (in the task's id).
 * Lists of episodes and `training/ID` also take format=csv or format=jsonl: a file with what the filters leave.
 *
 * An address that has no answer gives a status of 400, 403, 404 or 503 with Failure.
 *
 * In a mailable report the answers are embedded (Embedded): lists are whole (offset 0), pictures are data: URLs.
 */

/** The data of a mailable report, in `<script type="application/json" id="clawgym-data">`. */
export interface Embedded {
  /** The place that the report opens with, such as "/runs/ID". */
  home: string;
  /** Address, without "/api/" before it and without a query -> answer. `sources` is always there. */
  answers: Record<string, unknown>;
}

export interface Failure {
  /** What is wrong, ending with what to do. */
  error: string;
}

export type Kind = "run" | "training" | "pool" | "board" | "audit" | "attack" | "experiment" | "online";
/**
 * running: another process writes it now. complete: everything that was planned is there. incomplete: interrupted, or
 * not started. damaged: cannot be read; `problem` says why. unknown: nothing says whether it is complete.
 */
export type State = "running" | "complete" | "incomplete" | "damaged" | "unknown";
export type Outcome = "solved" | "failed" | "truncated" | "infra" | "unsupported";

/** A mean over tasks with its 95 % interval. */
export interface Estimate {
  value: number;
  low: number;
  high: number;
  tasks: number;
  method: string;
}

export interface Progress {
  done: number;
  total: number;
}

/** A part of a list. */
export interface Page<T> {
  /** Of the whole list, after filtering. */
  total: number;
  /** Before filtering. */
  all: number;
  offset: number;
  items: T[];
  /** Something is not in the list yet, or left out; otherwise empty. */
  note: string;
}

// ---------------------------------------------------------------------------------------------------------- sources

export interface Sources {
  /** Version of ClawGym. */
  library: string;
  /** Whether promote and rollback are allowed (`clawgym view --write`). */
  writable: boolean;
  /** The paths that were searched, as they were given. */
  paths: string[];
  sources: Source[];
  /** What could not be read, or was left out because there is too much. */
  problems: string[];
}

export interface Source {
  id: string;
  kind: Kind;
  /** The name of the folder or file; for a board, of its task set. */
  name: string;
  /** Where it is, below one of the paths. */
  path: string;
  state: State;
  /** Why it is damaged, otherwise empty. */
  problem: string;
  /** Seconds since 1970. */
  changed: number;
  /** The agent and model of a run; the method and model of a training; otherwise a few words. */
  label: string;
  /** The training that a pool belongs to. */
  parent: string | null;
  /** A run only: its figures for a table of runs. Null until they are computed. */
  run: RunFigures | null;
  /** A training only. */
  training: TrainingFigures | null;
  /** A run only: how much of the transcripts the search covers. Null for other kinds. */
  indexed: Progress | null;
}

export interface RunFigures {
  task_set: string;
  task_set_hash: string;
  agent: string;
  model: string;
  samples: number;
  /** ISO 8601. */
  created: string;
  planned: number;
  episodes: number;
  outcomes: Record<string, number>;
  strict: Estimate | null;
  official: Estimate | null;
  /** The baseline-adjusted score. */
  corrected: Estimate | null;
  cost_usd: number | null;
  tokens: number;
  /** Share of all attempts that ended by an infrastructure error. */
  infra_rate: number;
  seconds: number;
}

export interface TrainingFigures {
  method: string;
  model: string;
  created: string;
  steps: number;
  /** The newest score on the held-out split, else on the validation split. */
  score: Score | null;
}

/** What the page of a run, a training or an experiment begins with; see `Source`. */
export interface Shown {
  id: string;
  name: string;
  path: string;
  state: State;
  changed: number;
}

// --------------------------------------------------------------------------------------------------------------- run

export interface Run extends Shown {
  indexed: Progress;
  /** The main facts of the run manifest, to show in this order: label, value. */
  about: [string, string][];
  /** The run manifest without its tasks. */
  manifest: Record<string, unknown>;
  /** Null until it is computed; an event says when. The counts below are then empty. */
  summary: Summary | null;
  /** Not passed most often first. */
  checks: CheckCount[];
  /** Official scores of the graded episodes in 20 bins of equal width from 0 to 1. */
  distribution: { solved: number[]; unsolved: number[] };
  /** Values that filters take. */
  categories: string[];
  outcomes: string[];
  /** Median, 95th percentile and largest of the seconds of an episode; null without episodes. */
  slowest: { median: number; p95: number; max: number } | null;
  /** What could not be read. */
  notes: string[];
}

export interface CheckCount {
  name: string;
  /** Graded episodes in which the check scored below 1. */
  failed: number;
  /** Graded episodes that have the check. */
  graded: number;
  /** failed / graded. */
  share: number;
  /** Mean score of the check over these episodes. */
  mean: number;
  /** Number of tasks in which it was not passed. */
  tasks: number;
}

export interface Scores {
  episodes: number;
  strict: Estimate | null;
  official: Estimate | null;
  corrected: Estimate | null;
}

export interface GroupScores extends Scores {
  name: string;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  cached_tokens: number;
  /** US dollars; null if no price is known. */
  cost_usd: number | null;
}

/** The content of `summary.json` (clawgym.evaluation.summary.Summary). */
export interface Summary {
  scores: Scores;
  planned: number;
  complete: boolean;
  outcomes: Record<string, number>;
  /** Cause -> number of graded episodes that were not solved. */
  causes: Record<string, number>;
  pass_at: Record<string, Estimate>;
  pass_hat: Record<string, Estimate>;
  attempts: number;
  infra_attempts: number;
  infra_causes: Record<string, number>;
  /** Origin (host, endpoint, task) of infrastructure errors -> attempts. */
  infra_faults: Record<string, number>;
  infra_newest: Record<string, string>;
  infra_episodes: number;
  infra_rate: number;
  infra_share: number;
  /** The scores if episodes without a result counted as 0. */
  scores_infra_zero: Scores | null;
  missing: string[];
  unsupported: Record<string, string>;
  problems: Record<string, string>;
  tampered: string[];
  judged: Record<string, number>;
  judging: Record<string, JudgeAgreement>;
  /** By category, level and grader. */
  groups: Record<string, GroupScores[]>;
  safety: Record<string, Estimate>;
  usage: Usage;
  /** Phase -> seconds over the graded episodes. */
  seconds: Record<string, number>;
  cost_per_solved: number | null;
  tokens_per_solved: number | null;
  /** By score: the minimum detectable difference to a second run (80 % power). */
  detectable: Record<string, number>;
}

export interface JudgeAgreement {
  episodes: number;
  asked: number;
  read: number;
  alpha: number | null;
  same_verdict: number | null;
  prompt_tokens: number;
  completion_tokens: number;
  cost_usd: number | null;
}

// ---------------------------------------------------------------------------------------------------------- episodes

export type SortKey =
  | "order"
  | "task"
  | "outcome"
  | "official"
  | "corrected"
  | "passed"
  | "steps"
  | "tokens"
  | "cost"
  | "seconds"
  | "finished";

export interface EpisodeLine {
  /** Name of its folder; the part of the address. */
  name: string;
  /** Position in the order of the task set. */
  order: number;
  task: string;
  sample: number;
  category: string;
  level: string;
  outcome: Outcome;
  strict: number | null;
  official: number | null;
  corrected: number | null;
  /** Checks that scored 1, and all. */
  passed: number;
  checks: number;
  /** Names of the checks that were not passed; at most 8. */
  failed: string[];
  /** Why it was not solved, or why there is no result. */
  cause: string;
  /** Origin of an infrastructure error. */
  fault: string;
  steps: number;
  tool_calls: number;
  prompt_tokens: number;
  completion_tokens: number;
  cost_usd: number | null;
  /** Of all phases. */
  seconds: number;
  /** Lines of the run for this episode; more than 1 if it was retried. */
  attempts: number;
  tampered: boolean;
  /** The grader runs the agent's code, which could forge the result. */
  runs_agent_code: boolean;
  /** Grader and model, if a model gave the scores. */
  judged_by: string;
  /** ISO 8601. */
  finished: string;
}

export interface Episode extends EpisodeLine {
  run: string;
  task_hash: string;
  seed: number | null;
  checks_list: Check[];
  /** What else is known of the grading, to show in this order: label, value. */
  facts: [string, string][];
  phases: Record<string, number>;
  /** Every line of this episode, oldest first. */
  history: Attempt[];
  final_message: string;
  /** What the verifier printed: what the checks saw. Beginning and end of it, "" if nothing is stored. */
  verifier_log: string;
  /** The whole message of an infrastructure error, or the traceback of the agent. */
  error_log: string;
  /** Votes of a judge that graded the submission: criterion -> scores. */
  votes: { criterion: string; votes: number[] }[];
  /** Files of the episode's folder. */
  files: { name: string; size: number }[];
  /** Names and sizes in the stored workspace, as the agent left it. */
  workspace: Workspace;
  turns: number;
  /** Pictures in the order in which the agent saw them, for a replay. */
  pictures: Picture[];
  /** Whether `tokens` has something for a turn of this episode. */
  has_tokens: boolean;
  /** The same episode in a pool, which recorded its gateway session. */
  pool: { source: string; seq: number } | null;
  /** What is not stored, or left out, in plain words. */
  notes: string[];
}

export interface Check {
  name: string;
  /** In [0, 1]. */
  score: number;
  /** The lines of the verifier's log that name this check; "" if none does. */
  seen: string;
}

export interface Attempt {
  attempt: number;
  outcome: Outcome;
  cause: string;
  fault: string;
  seconds: number;
  finished: string;
}

export interface Workspace {
  files: { path: string; size: number; kind: "file" | "folder" | "link" | "other" }[];
  /** Why there is none, or what was left out; otherwise empty. */
  note: string;
}

export interface Picture {
  /** An address on this server, or a data: URL in a mailable report. */
  src: string;
  /** Index of the step that saw it. */
  step: number;
}

/** One entry of a transcript. */
export interface Step {
  /** Index in the transcript, from 0. */
  n: number;
  source: "system" | "user" | "agent";
  /** ISO 8601; may be empty. */
  time: string;
  text: string;
  reasoning: string;
  model: string;
  usage: Usage | null;
  calls: Call[];
  observations: Observation[];
  /** Characters left out of the texts of this step. */
  cut: number;
  /** main, subagent, compaction, unknown; "" if the role is not recorded. */
  role: string;
  policy_version: number | null;
  finish_reason: string;
  /** Why the turn's tokens are not trained on; "" if they may be. */
  flaw: string;
  /** Index of the turn of this step, for `tokens?turn=`; null without stored token ids. */
  turn: number | null;
  /** What judges said about this turn. */
  rewards: TurnReward[];
}

export interface Call {
  id: string;
  name: string;
  /** A single text argument unchanged, anything else as JSON. */
  arguments: string;
  /** Files that this call wrote, as its arguments say. Empty if they do not: commands of a shell may change more. */
  changes: Change[];
}

export interface Change {
  path: string;
  /** A unified diff against what an earlier call of this transcript wrote to the path. */
  diff: string;
  /** Whether the content before the call is not known from the transcript; the diff then shows everything as added. */
  whole: boolean;
}

export interface Observation {
  call: string;
  text: string;
  picture: Picture | null;
}

export interface TurnReward {
  /** Such as "judge", the process reward that training uses. */
  name: string;
  /** Null: no valid vote. */
  value: number | null;
  judge: string;
  votes: (number | null)[];
  /** The judge's text for each vote. */
  texts: string[];
  hints: string[];
}

/** The tokens of one turn: the end of its prompt that is new, and what was sampled. */
export interface Tokens {
  turn: number;
  /** How many turns the episode has. */
  turns: number;
  role: string;
  policy_version: number | null;
  flaw: string;
  /** Ids of the prompt before `context`, which are those of the turn that this one continues. */
  before: number;
  context: Token[];
  sampled: Token[];
  /** What training added up for this turn; null if nothing is stored. */
  reward: number | null;
  /** Where the advantages are from; null without any. */
  advantages: AdvantagesOf | null;
  /** What is missing and why, for example the text of the tokens without a tokenizer. */
  note: string;
}

export interface AdvantagesOf {
  /** The step of the training that used them; null if they are computed by GRPO from the rewards of the group. */
  step: number | null;
  /** Least and most of the tokens of this turn, whose mean is shown; null if computed, or if the turn was not trained on. */
  spread: [number, number] | null;
}

export interface Token {
  id: number;
  /** Null without a tokenizer. */
  text: string | null;
  /** Log-probability in nats; null in a prompt, or if it was not recorded. */
  logprob: number | null;
  /** Null if it is not stored. */
  advantage: number | null;
  /** Whether it is trained on. */
  trained: boolean;
}

// ----------------------------------------------------------------------------------------------------------- compare

/** Run `b` against run `a` (clawgym.evaluation.compare.Comparison); a positive difference means that b is better. */
export interface Compare {
  a: Side;
  b: Side;
  /** Why the runs cannot be compared; then `scores` is empty. Otherwise "". */
  refused: string;
  tasks: number;
  /** strict, official, corrected. */
  scores: Record<string, Difference>;
  left_out: Record<string, string[]>;
  notes: string[];
  /** The tasks that both runs graded, largest difference of the official score first. */
  by_task: TaskDifference[];
  /** Checks that both runs have, largest difference of the share not passed first. */
  checks: CheckDifference[];
  alpha: number;
  power: number;
}

export interface Side {
  id: string;
  name: string;
  run: string;
  samples: number;
  means: Record<string, number>;
  infra_share: number;
  missing: number;
  usage: Usage;
  /** Phase -> seconds over the graded episodes. */
  seconds: Record<string, number>;
  cost_per_solved: number | null;
  tokens_per_solved: number | null;
}

export interface Difference {
  value: number;
  low: number;
  high: number;
  p: number;
  tasks: number;
  ahead: number;
  behind: number;
  detectable: number;
  method: string;
  test: string;
  told_apart: boolean;
  verdict: "better" | "worse" | "not told apart";
}

export interface TaskDifference {
  task: string;
  category: string;
  strict: [number, number];
  official: [number, number];
  /** Names of the first episode of the task in a and in b. */
  episodes: [string, string];
}

export interface CheckDifference {
  name: string;
  /** Share of the graded episodes in which it was not passed, in a and in b. */
  a: number;
  b: number;
}

// ---------------------------------------------------------------------------------------------------------- training

export interface Training extends Shown {
  about: [string, string][];
  manifest: Record<string, unknown>;
  /** Setting (dotted) -> its value as JSON. */
  config: [string, string][];
  data: DataUse[];
  /** Steps of `metrics`, in order. At most 2,000 are given; longer runs are thinned out evenly. */
  steps: number[];
  /** Seconds since 1970 of each step. */
  times: (number | null)[];
  /** Metric -> value at each step, null where it was not measured. */
  metrics: Record<string, (number | null)[]>;
  /** How to show the metrics. Those that no chart names are in charts of their own, with `main` false. */
  charts: Chart[];
  evaluations: Score[];
  timeline: Span[];
  /** Guards that are set, and whether one ended the run. */
  guards: Guard[];
  checkpoints: Checkpoint[];
  /** The source of its pool. */
  pool: string | null;
  notes: string[];
}

export interface DataUse {
  use: string;
  name: string;
  split: string;
  tasks: number | null;
  sha256: string;
}

export interface Chart {
  title: string;
  /** Metrics, in the order of the legend. */
  metrics: string[];
  /** What the legend calls them. */
  labels: string[];
  main: boolean;
}

/** One evaluation of a split. */
export interface Score {
  step: number;
  task_set: string;
  split: string;
  score: number;
  low: number;
  high: number;
  episodes: number;
  samples: number;
  greedy: boolean;
  by_generator: Record<string, number>;
  /** Mean share of the checks; null if it was not recorded. */
  partial: number | null;
  infra: number;
}

export interface Span {
  step: number;
  loop: string;
  /** Seconds since the first span. */
  start: number;
  end: number;
}

export interface Guard {
  name: string;
  limit: number;
  /** The metric that it watches. */
  metric: string;
  /** Steps at which the metric was beyond the limit. */
  fired: number[];
}

export interface Checkpoint {
  name: string;
  step: number;
  best: boolean;
  last: boolean;
}

// -------------------------------------------------------------------------------------------------------------- pool

export interface Pool {
  id: string;
  name: string;
  path: string;
  changed: number;
  /** The training that it belongs to. */
  training: string | null;
  channels: Channel[];
  batches: Record<string, number>;
  images: number;
  tools: number;
  /** By version of the policy: turns that it sampled. */
  versions: { version: number | null; turns: number; tokens: number }[];
  notes: string[];
}

export interface Channel {
  name: string;
  /** Outcome, or `open` or `closed` -> episodes. */
  episodes: Record<string, number>;
  /** `delivered`, or why an episode was left out -> episodes. */
  fates: Record<string, number>;
  /** State -> groups. */
  groups: Record<string, number>;
  /** Reason -> groups that were dropped. */
  dropped: Record<string, number>;
  turns: number;
  flawed_turns: number;
  /** Flaw -> turns. */
  flaws: Record<string, number>;
  /** Decision of curation -> episodes. */
  curation: { kept: number; left_out: number; undecided: number };
  samples: number;
  trained_ids: number;
  samples_per_episode: number | null;
  /** Seconds since 1970. */
  newest: number;
}

export interface PoolGroup {
  id: string;
  channel: string;
  task: string;
  size: number;
  members: number;
  closed: number;
  infra: number;
  /** open, ready, leased, consumed, dropped */
  state: string;
  reason: string;
  opened: number;
  /** Rewards of its episodes, in order; null where there is none. */
  rewards: (number | null)[];
  /** Their `seq`. */
  episodes: number[];
}

export interface PoolEpisodeLine {
  seq: number;
  id: string;
  channel: string;
  group: string;
  task: string;
  sample: number;
  agent: string;
  state: "open" | "closed";
  outcome: string;
  cause: string;
  reward: number | null;
  turns: number;
  flawed: number | null;
  /** Training sequences of role main. */
  sequences: number | null;
  trained_ids: number | null;
  trainable: boolean | null;
  fate: string;
  opened: number;
  closed: number | null;
}

export interface PoolEpisode extends PoolEpisodeLine {
  pool: string;
  /** The same episode in a run. */
  run: { source: string; name: string } | null;
  rewards: Record<string, number>;
  penalties: Record<string, number>;
  tags: string[];
  /** Why curation decided so. */
  curation_note: string;
  meta: Record<string, unknown>;
  /** The members of its group, for the advantage. */
  members: { seq: number; sample: number; reward: number | null }[];
  /** Its reward minus the mean of its group, and that divided by the standard deviation; null if undefined. */
  advantage: { centred: number; normalized: number | null } | null;
  /** The advantages that training used; null if it stored none. */
  trained: { step: number; turns: TurnAdvantage[] } | null;
  /** Every turn that a judge scored, by the index of its step. */
  rewards_by_turn: { step: number; name: string; value: number | null }[];
  pictures: Picture[];
  notes: string[];
}

/** The advantages of the tokens of one turn. */
export interface TurnAdvantage {
  turn: number;
  /** Index of its step in the transcript; null if the turn is gone. */
  step: number | null;
  mean: number;
  least: number;
  most: number;
}

/** The turns as a tree, and the training sequences, which are its paths. */
export interface SequenceTree {
  turns: TreeTurn[];
  sequences: Sequence[];
  /** Roles that the sequences were made for. */
  roles: string[];
  note: string;
}

export interface TreeTurn {
  turn: number;
  parent: number | null;
  role: string;
  flaw: string;
  policy_version: number | null;
  context_ids: number;
  sampled_ids: number;
  finish_reason: string;
}

export interface Sequence {
  turns: number[];
  /** The turns whose sampled ids are trained on in this sequence. */
  trained: number[];
  ids: number;
  trained_ids: number;
}

// ------------------------------------------------------------------------------------------- boards, audits, attacks

export interface Board {
  id: string;
  task_set: string;
  task_set_hash: string;
  by: "strict" | "corrected" | "official";
  entries: BoardEntry[];
  notes: string[];
}

export interface BoardEntry {
  /** The source of the run. */
  run: string;
  rank: number | null;
  name: string;
  folder: string;
  agent: string;
  agent_version: string;
  model: string;
  samples: number;
  isolation: string;
  library: string;
  /** Over the tasks whose grader is code that only reads files. */
  strict: Estimate | null;
  corrected: Estimate | null;
  official: Estimate | null;
  /** Groups of tasks that are not in the strict score, with their strict score. */
  excluded: GroupScores[];
  episodes: number;
  planned: number;
  infra_rate: number;
  cost_per_solved: number | null;
  tokens_per_solved: number | null;
  verified: string;
  flags: string[];
}

export interface Audit {
  id: string;
  name: string;
  path: string;
  state: State;
  task_set: string;
  task_set_hash: string;
  size: number;
  audited: number;
  /** Tasks without a flaw. */
  kept: number;
  flaws: { name: string; breaks: boolean; about: string; tasks: number }[];
  /** What no-model policies earn. */
  policies: { policy: string; mean: number; max: number; above_0: number; above_half: number; crashed: number }[];
  /** Mean of the no-model baselines. */
  baseline: number;
  seconds: Record<string, number>;
  unsupported: Record<string, string>;
  infra: Record<string, string>;
  problems: Record<string, string>;
}

export interface AuditTask {
  task: string;
  /** The no-model baseline. */
  baseline: number;
  solution: string | null;
  /** Flaw -> what was found. */
  flaws: Record<string, string>;
  broken: boolean;
}

export interface Attack {
  id: string;
  name: string;
  path: string;
  state: State;
  task_set: string;
  task_set_hash: string;
  size: number;
  attacked: number;
  rates: AttackRate[];
  exploits: { name: string; tries: string }[];
  infra: Record<string, string>;
}

export interface AttackRate {
  exploit: string;
  /** "reads files", "subprocess", "in_process". */
  task_class: string;
  grader: "ClawGym" | "original grader";
  tasks: number;
  earned: number;
  official: number;
  full: number;
  gain: number;
  official_gain: number;
  /** Whether reward is expected, as the verifier runs the agent's code. */
  allowed: boolean;
  rate: number;
  earned_on: string[];
}

// ------------------------------------------------------------------------------------------------------- experiments

/** An experiment that compares arms, such as methods of training (benchmarks/personal.py). */
export interface Experiment extends Shown {
  about: [string, string][];
  notes: string[];
  charts: Curves[];
  tables: Grid[];
}

export interface Curves {
  title: string;
  about: string;
  /** Name of the horizontal axis. */
  across: string;
  /** Limits of the vertical axis; null: as the values are. */
  from: number | null;
  to: number | null;
  lines: Curve[];
}

/** One arm, with its interval. */
export interface Curve {
  name: string;
  x: number[];
  y: number[];
  low: number[];
  high: number[];
}

export interface Grid {
  title: string;
  about: string;
  columns: string[];
  rows: string[][];
}

// ------------------------------------------------------------------------------------------------------------ online

export interface Online {
  id: string;
  name: string;
  path: string;
  /** Address of the service, if it runs. */
  base_url: string | null;
  serving: number;
  versions: Version[];
  /** Changes of what answers, oldest first. */
  events: { at: number; kind: "promoted" | "rolled-back"; version: number; before: number; reason: string }[];
  /** The comparison that the gate works on, or did last. */
  comparison: GateResult | null;
  /** How the version that answers is rated since its promotion. */
  watch: { version: number; verdict: string; reason: string } | null;
  writable: boolean;
  notes: string[];
}

export interface Version {
  number: number;
  parent: number | null;
  state: "candidate" | "promoted" | "rejected" | "withdrawn" | "erased";
  answers: boolean;
  made: number;
  sessions: number;
  gate: GateResult[];
  can_promote: boolean;
  can_roll_back_to: boolean;
}

export interface GateResult {
  version: number;
  verdict: string;
  reasons: string[];
  /** Criterion -> what was measured. */
  figures: {
    name: string;
    n: number;
    value: number | null;
    low: number | null;
    high: number | null;
    /** What `low` must be at least. */
    needed: number | null;
  }[];
}

// -------------------------------------------------------------------------------------------------------------- live

export interface Live {
  runs: LiveRun[];
}

export interface LiveRun {
  /** The source, if its folder is among the paths. */
  source: string | null;
  /** Name of the run folder, or "process N". */
  name: string;
  pid: number;
  sandboxes: LiveSandbox[];
}

export interface LiveSandbox {
  id: string;
  task: string;
  instruction: string;
  agent: string;
  /** Turns so far. */
  turn: number;
  /** The last action. */
  action: string;
  /** The end of its observation. */
  text: string;
  /** Address of the newest picture; another one for each picture. Null without a desktop. */
  picture: string | null;
}

// ------------------------------------------------------------------------------------------------------------ search

export interface SearchHit {
  source: string;
  /** Name of the run. */
  run: string;
  /** NAME of the episode. */
  episode: string;
  task: string;
  outcome: Outcome;
  /** Index of the step. */
  step: number;
  /** Parts of the text around the hits; the second value says whether the part is a hit. */
  parts: [string, boolean][];
}

// ------------------------------------------------------------------------------------------------------------ events

/** `data` of a server-sent event; the events have no name. */
export type LiveEvent =
  | { kind: "sources" }
  | { kind: "source"; id: string; state: State; changed: number; indexed: Progress | null }
  | { kind: "live" };
