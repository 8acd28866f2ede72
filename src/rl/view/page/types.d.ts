// Types of what the server answers, made from src/rl/view/responses.py by `uv run scripts/reference.py`.

export interface Runs {
  runs: RunRow[];
  folders: string;
}

export interface RunRow {
  key: string;
  name: string;
  model: string;
  environments: string[];
  state: "died" | "ended" | "live" | "stopped" | "unreadable";
  why: string;
  step: number;
  max_steps: number;
  reward: number | null;
  rewards: (number | null)[];
  measure: string;
  evals: EvalChange[];
  lag: number | null;
  tokens_per_s: number | null;
  seconds: number;
  last_sign: number;
  changed: number;
  bytes: number;
}

export interface EvalChange {
  name: string;
  first: number;
  last: number;
  first_version: number;
  last_version: number;
  clear: boolean;
}

export interface Comparison {
  settings: SettingDiff[];
  evals: EvalPoint[];
  learned: Learned[];
  faults: string[];
  notes: string[];
}

export interface SettingDiff {
  key: string;
  values: (string | null)[];
}

export interface EvalPoint {
  name: string;
  version: number;
  means: (number | null)[];
  errors: (number | null)[];
}

export interface Learned {
  rollouts: number;
  rewards: (number | null)[];
}

export interface Metrics {
  metrics: Metric[];
}

export interface Metric {
  name: string;
  section: string;
  what: string;
}

export interface Curves {
  series: Series[];
  marks: CurveMark[];
}

export interface Series {
  run: string;
  name: string;
  steps: number[];
  x: (number | null)[];
  values: (number | null)[];
  errors: (number | null)[];
  each: number;
  firsts: number[];
  lows: number[];
  highs: number[];
}

export interface CurveMark {
  run: string;
  kind: "change" | "checkpoint" | "death" | "eval" | "restart";
  step: number;
  x: number | null;
  text: string;
}

export interface RolloutPage {
  total: number;
  offset: number;
  rows: RolloutRow[];
  facets: Record<string, Record<string, number>>;
  histogram: Histogram | null;
  sorts: string[];
  searched: number | null;
  complete: boolean;
  damaged: string[];
}

export interface RolloutRow {
  kind: "eval" | "pending" | "train";
  step: number | null;
  version: number | null;
  env: string;
  task: number;
  group: number | null;
  rollout: number | null;
  agent: string;
  reward: number | null;
  advantage: number | null;
  outcome: string;
  why: string;
  tokens: number;
  turns: number;
  failed: boolean;
}

export interface Histogram {
  edges: number[];
  counts: number[];
  ranges: number[][];
}

export interface RolloutDetail {
  row: RolloutRow;
  messages: Message[];
  prompt: number;
  metrics: Record<string, number | null>;
  fields: Record<string, any>;
  error: string;
  group: RolloutRow[];
  explanation: string;
  has_tokens: boolean;
}

export interface Message {
  role: string;
  thinking: string;
  text: string;
  calls: Call[];
  name: string;
  left_out: number;
}

export interface Call {
  name: string;
  arguments: string;
}

export interface Tokens {
  total: number;
  starts: number[];
  offset: number;
  pieces: string[];
  ids: number[];
  trained: boolean[];
  values: Record<string, (number | null)[]>;
  signals: Record<string, Signal>;
  note: string;
}

export interface Signal {
  what: string;
  most: number;
  values: number[];
}

export interface Tasks {
  total: number;
  offset: number;
  rows: TaskRow[];
  damaged: string[];
}

export interface TaskRow {
  env: string;
  task: number;
  rollouts: number;
  first: number | null;
  last: number | null;
  change: number | null;
  prompt: string;
}

export interface TaskDetail {
  env: string;
  task: number;
  prompt: Message[];
  versions: TaskVersion[];
  without_version: number;
  note: string;
}

export interface TaskVersion {
  version: number;
  mean: number | null;
  count: number;
  rows: RolloutRow[];
}

export interface LaneTimeline {
  begin: number;
  end: number;
  first: number;
  last: number;
  lanes: Lane[];
  moments: Moment[];
  quiet: LaneSpan[];
  note: string;
}

export interface Lane {
  process: string;
  name: string;
  spans: LaneSpan[];
}

export interface LaneSpan {
  name: string;
  begin: number;
  end: number;
  text: string;
  waits_for: string;
}

export interface Moment {
  kind: string;
  time: number;
  process: string;
  text: string;
  step: number | null;
}

export interface Health {
  state: "died" | "ended" | "live" | "stopped" | "unreadable";
  bottleneck: string;
  lines: string[];
  findings: Finding[];
  processes: ProcessRow[];
  machines: MachineRow[];
  mismatch: MismatchRow[];
}

export interface Finding {
  text: string;
  serious: boolean;
  metrics: string[];
  why: string;
  files: string[];
}

export interface ProcessRow {
  name: string;
  doing: string;
  heartbeat: number | null;
  attempts: number[];
}

export interface MachineRow {
  index: number;
  host: string;
  does: string;
  facts: string;
  state: "absent" | "leaving" | "live" | "lost";
  since: number | null;
  last_sign: number | null;
  processes: string[];
}

export interface MismatchRow {
  kind: string;
  first: number;
  last: number;
  tokens: number;
  samples: number;
  kl: number;
  error: number;
}

export interface Log {
  lines: string[];
  bytes: number;
}

export interface Answers {
  runs: Runs;
  compare: Comparison;
  metrics: Metrics;
  curves: Curves;
  rollouts: RolloutPage;
  rollout: RolloutDetail;
  tokens: Tokens;
  tasks: Tasks;
  task: TaskDetail;
  timeline: LaneTimeline;
  health: Health;
  log: Log;
}
