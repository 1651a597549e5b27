/** The steps of a transcript, of which only those on the screen are in the document. */
import { TextInput } from "@mantine/core";
import { useWindowVirtualizer } from "@tanstack/react-virtual";
import { memo, useCallback, useEffect, useMemo, useRef, useState, type ReactNode } from "react";
import type { Call, Change, Observation, Step, TurnReward } from "../api";
import { Chart } from "../chart";
import { usePaged } from "../data";
import { count, number, plural, whole } from "../format";
import { Icon } from "../icons";
import { useKeys } from "../keys";
import { useQuery } from "../router";
import { Blank, Long, Mark, Notice, Problem, Shot, shorten } from "../ui";
import { BAR, useTop } from "../vtable";
import type { RewardPoint } from "./episode";

/** The largest number of steps in one list: a document has a largest height. */
const MOST = 50_000;

interface Props {
  base: string;
  live: string;
  rewards: RewardPoint[];
  tokens: boolean;
  aside: ReactNode;
  final: string;
  empty: string;
}

export function Timeline({ base, live, rewards, tokens, aside, final, empty }: Props) {
  const [query, change] = useQuery();
  const list = usePaged<Step>(`${base}/turns`, live, 30);
  const wanted = query.get("step");
  const here = wanted === null ? null : Number(wanted);
  const from = here === null ? 0 : Math.floor(here / MOST) * MOST;
  const all = list.total ?? 0;
  const total = Math.max(0, Math.min(MOST, all - from));
  const [place, top] = useTop<HTMLDivElement>();
  const rows = useWindowVirtualizer({
    count: total,
    estimateSize: () => 170,
    overscan: 3,
    scrollMargin: top,
    scrollPaddingStart: BAR + 12,
    getItemKey: (index) => from + index,
  });
  const items = rows.getVirtualItems();
  const [first, last] = [items[0]?.index ?? 0, items[items.length - 1]?.index ?? 0];
  const { show } = list;
  useEffect(() => show(from + first, from + last), [show, from, first, last]);
  // What was opened stays open when it is scrolled away and back.
  const opened = useRef(new Set<string>());
  const [, redraw] = useState(0);
  const open = useCallback((key: string, on: boolean) => {
    if (on) opened.current.add(key);
    else opened.current.delete(key);
    redraw((n) => n + 1);
  }, []);

  const went = useRef<number | null>(null);
  const go = useCallback(
    (step: number) => {
      went.current = step;
      change({ step: String(step) });
      rows.scrollToIndex(step % MOST, { align: "start" });
    },
    [change, rows],
  );
  const known = total > 0;
  useEffect(() => {
    if (here !== null && known && went.current !== here) {
      went.current = here;
      rows.scrollToIndex(here - from, { align: "start" });
    }
  }, [here, known, from, rows]);
  const visible = () => items.find((item) => item.end > scrollY + BAR + 14)?.index ?? 0;
  const move = (by: number) => {
    if (!all) return false;
    const now = here !== null && items.some((item) => item.index === here - from) ? here : from + visible() - (by > 0 ? 1 : 0);
    go(Math.min(all - 1, Math.max(0, now + by)));
    return true;
  };
  const field = useRef<HTMLInputElement>(null);
  useKeys({ j: () => move(1), k: () => move(-1), "/": () => field.current?.focus() });
  const chart = useMemo(() => lines(rewards), [rewards]);

  if (list.error && !list.total) return <Problem error={list.error} again={list.again} />;
  return (
    <div className="columns">
      <div>
        {list.note && <Notice>{list.note}</Notice>}
        {list.total === 0 && (
          <Blank small title="No steps">
            <p>{empty}</p>
          </Blank>
        )}
        {all > MOST && (
          <p className="filters">
            Steps {whole(from)} to {whole(from + total - 1)} of {whole(all)}
            {from > 0 && (
              <button className="more" onClick={() => go(from - MOST)}>
                Earlier
              </button>
            )}
            {from + total < all && (
              <button className="more" onClick={() => go(from + MOST)}>
                Later
              </button>
            )}
          </p>
        )}
        <div ref={place} className="timeline" role="feed" aria-busy={list.total === undefined} aria-label="Timeline" style={{ height: list.total === undefined ? 600 : rows.getTotalSize() }}>
          {items.map((item) => {
            const step = list.row(from + item.index);
            return (
              <div
                key={item.key}
                ref={rows.measureElement}
                data-index={item.index}
                className={`turn ${step?.source ?? ""} ${here === from + item.index ? "here" : ""}`}
                style={{ transform: `translateY(${item.start - top}px)` }}
              >
                {step ? (
                  <StepCard step={step} total={all} tokens={tokens} opened={opened.current} version={versionOf(opened.current, step.n)} open={open} />
                ) : (
                  <article aria-busy="true" style={{ height: 150 }}>
                    <div className="ghost" style={{ width: "24%", marginBottom: 16 }} />
                    <div className="ghost" style={{ width: "80%", marginBottom: 8 }} />
                    <div className="ghost" style={{ width: "64%" }} />
                  </article>
                )}
              </div>
            );
          })}
        </div>
        {final && (
          <div className="card">
            <div className="title">
              <h2>Final message</h2>
            </div>
            <Long text={final} cap={4000} lines={40} />
          </div>
        )}
      </div>
      <div className="aside">
        {all > 0 && (
          <form
            onSubmit={(event) => {
              event.preventDefault();
              const step = Number(field.current?.value);
              if (Number.isInteger(step) && step >= 0 && step < all) go(step);
            }}
          >
            <TextInput ref={field} size="xs" inputMode="numeric" aria-label="Go to step" placeholder={`Go to step, 0 to ${whole(all - 1)}`} leftSection={<Icon name="right" />} />
          </form>
        )}
        {chart.length > 0 && <Chart title="Process rewards" lines={chart} across="step" height={130} bars onPick={go} />}
        {aside}
      </div>
    </div>
  );
}

function lines(rewards: RewardPoint[]) {
  const names = [...new Set(rewards.map((reward) => reward.name))];
  return names.map((name) => {
    const own = rewards.filter((reward) => reward.name === name);
    return { name, x: own.map((reward) => reward.step), y: own.map((reward) => reward.value) };
  });
}

/** Changes when something of a step is opened or closed, so that only that step is drawn again. */
function versionOf(opened: Set<string>, n: number): string {
  if (!opened.size) return "";
  return [...opened].filter((key) => key.startsWith(`${n}:`)).join();
}

interface CardProps {
  step: Step;
  total: number;
  tokens: boolean;
  opened: Set<string>;
  version: string;
  open: (key: string, on: boolean) => void;
}

const NAMES = { system: "System", user: "User", agent: "Agent" } as const;

const StepCard = memo(function StepCard({ step, total, tokens, opened, open }: CardProps) {
  const [, change] = useQuery();
  const text = (part: string, value: string, className?: string, cap = 1500, most = 16) => {
    const key = `${step.n}:${part}`;
    return <Long text={value} cap={cap} lines={most} {...(className ? { className } : {})} open={opened.has(key)} onOpen={(on) => open(key, on)} />;
  };
  const seen = new Map<string, Observation[]>();
  for (const each of step.observations) seen.set(each.call, [...(seen.get(each.call) ?? []), each]);
  const results = (call: string, part: string) =>
    (seen.get(call) ?? []).map((each, at) => (
      <div key={at} className="part">
        <div className="what">Result</div>
        {each.text && text(`${part}.${at}`, each.text, "block seen", 1000, 12)}
        {each.picture && <Shot className="shot" link src={each.picture.src} alt={`Screenshot at step ${step.n}`} />}
      </div>
    ));
  const called = new Set(step.calls.map((call) => call.id));
  return (
    <article aria-posinset={step.n + 1} aria-setsize={total} aria-label={`Step ${step.n}, ${NAMES[step.source]}`}>
      <header>
        <button className="plainbutton" title="Link to this step" aria-label={`Link to step ${step.n}`} onClick={() => change({ step: String(step.n) })}>
          #{step.n}
        </button>
        <b>{NAMES[step.source]}</b>
        {step.role && step.role !== "main" && <Mark kind="info">{step.role}</Mark>}
        {step.flaw && (
          <Mark kind="warn" icon="warn">
            not trained on: {step.flaw}
          </Mark>
        )}
        {step.finish_reason && step.finish_reason !== "stop" && step.finish_reason !== "tool_calls" && <Mark kind="warn">{step.finish_reason}</Mark>}
        {step.rewards.map((reward) => (
          <Mark key={reward.name} kind={reward.value === null ? "" : reward.value > 0 ? "solved" : reward.value < 0 ? "failed" : ""}>
            {reward.name} {reward.value === null ? "no valid vote" : number(reward.value)}
          </Mark>
        ))}
        <span className="end">
          {step.model && <span className="big-only">{step.model}</span>}
          {step.policy_version !== null && <span>version {step.policy_version}</span>}
          {step.usage && (
            <span title={`${whole(step.usage.prompt_tokens)} tokens in, ${whole(step.usage.cached_tokens)} of them cached; ${whole(step.usage.completion_tokens)} out`}>
              {count(step.usage.prompt_tokens)} in, {count(step.usage.completion_tokens)} out
            </span>
          )}
          {step.time && <time dateTime={step.time}>{step.time.slice(11, 19)}</time>}
          {tokens && step.turn !== null && (
            <button className="more" style={{ padding: 0 }} onClick={() => change({ tab: "tokens", turn: String(step.turn) }, { push: true })}>
              Tokens
            </button>
          )}
        </span>
      </header>
      {step.reasoning && (
        <div className="part">
          <div className="what">Reasoning</div>
          {text("why", step.reasoning, "text why", 700, 8)}
        </div>
      )}
      {step.text && <div className="part">{text("text", step.text)}</div>}
      {step.calls.map((call, at) => (
        <CallPart key={at} call={call} text={(value) => text(`call.${at}`, value, "block", 1000, 14)} opened={opened} open={open} part={`${step.n}:diff.${at}`}>
          {results(call.id, `seen.${at}`)}
        </CallPart>
      ))}
      {[...seen.keys()].filter((id) => !called.has(id)).map((id) => <div key={id}>{results(id, `other.${id}`)}</div>)}
      {step.rewards.some((reward) => reward.votes.length || reward.hints.length) && (
        <div className="part">
          {step.rewards.map((reward, at) => (
            <Votes key={at} reward={reward} text={text} at={at} />
          ))}
        </div>
      )}
      {step.cut > 0 && <p className="soft">{plural(step.cut, "character")} of this step are left out here; the transcript has them.</p>}
      {!step.text && !step.reasoning && !step.calls.length && !step.observations.length && <p className="soft">Empty.</p>}
    </article>
  );
});

function CallPart(props: {
  call: Call;
  text: (value: string) => ReactNode;
  opened: Set<string>;
  open: (key: string, on: boolean) => void;
  part: string;
  children: ReactNode;
}) {
  const { call } = props;
  return (
    <div className="part">
      <div className="what">
        Tool call <code>{call.name}</code>
      </div>
      {call.arguments && props.text(call.arguments)}
      {call.changes.map((change, at) => {
        const key = `${props.part}.${at}`;
        return <Diff key={at} change={change} open={props.opened.has(key)} onOpen={(on) => props.open(key, on)} />;
      })}
      {props.children}
    </div>
  );
}

const KINDS: Record<string, string> = { "+": "add", "-": "remove", "@": "at" };
const MOST_LINES = 24;

export function Diff({ change, open, onOpen }: { change: Change; open: boolean; onOpen: (on: boolean) => void }) {
  const lines = change.diff.split("\n").filter((line) => !/^(---|\+\+\+) /.test(line));
  while (lines.length && !lines[lines.length - 1]) lines.pop();
  const [added, removed] = ["+", "-"].map((sign) => lines.filter((line) => line.startsWith(sign)).length);
  const shown = open ? lines.slice(0, 5000) : lines.slice(0, MOST_LINES);
  return (
    <div className="diff">
      <div className="path">
        <b>{change.path}</b>
        <span className="soft">
          {change.whole ? "written whole" : "changed"}, <span aria-label={`${added} lines added`}>+{added}</span>{" "}
          <span aria-label={`${removed} lines removed`}>−{removed}</span>
        </span>
      </div>
      {shown.map((line, at) => (
        <span key={at} className={`line ${KINDS[line[0] ?? ""] ?? ""}`}>
          {open ? line || " " : shorten(line || " ", 400, 1)}
        </span>
      ))}
      {lines.length > MOST_LINES && (
        <button className="more" style={{ padding: "4px 12px" }} aria-expanded={open} onClick={() => onOpen(!open)}>
          {open ? "Show less" : `Show all ${whole(lines.length)} lines`}
        </button>
      )}
    </div>
  );
}

function Votes({ reward, text, at }: { reward: TurnReward; text: (part: string, value: string, className?: string, cap?: number, most?: number) => ReactNode; at: number }) {
  return (
    <div className="reward">
      <div className="what">
        {reward.judge ? `Judge ${reward.judge}` : reward.name}
        {reward.votes.length > 0 && <>: {plural(reward.votes.length, "vote")}</>}
      </div>
      <ul style={{ display: "grid", gap: 6 }}>
        {reward.votes.map((vote, n) => (
          <li key={n}>
            <Mark kind={vote === null ? "" : vote > 0 ? "solved" : vote < 0 ? "failed" : ""}>{vote === null ? "not valid" : number(vote)}</Mark>{" "}
            {reward.texts[n] && text(`vote.${at}.${n}`, reward.texts[n] ?? "", "text soft", 500, 5)}
          </li>
        ))}
        {reward.hints.map((hint, n) => (
          <li key={`hint${n}`}>
            <Mark kind="info">hint</Mark> {text(`hint.${at}.${n}`, hint, "text", 600, 6)}
          </li>
        ))}
      </ul>
    </div>
  );
}

