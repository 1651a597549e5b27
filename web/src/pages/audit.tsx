/** The audit of a task set, and what attacks on it earned. */
import { useMemo, useRef } from "react";
import type { Attack, AttackRate, Audit, AuditTask } from "../api";
import { query as asQuery, useAnswer, usePaged } from "../data";
import { duration, number, percent, plural, whole } from "../format";
import { useKeys } from "../keys";
import { Select } from "../lists";
import { useQuery } from "../router";
import { Bars, Blank, FilterField, Head, Listing, Mark, Notice, Reasons, Section, Shown, StateMark, Table, Tile } from "../ui";
import { Found, VirtualTable, type VCol } from "../vtable";

export function AuditPage({ params }: { params: { id: string } }) {
  const asked = useAnswer<Audit>(`audits/${params.id}`, params.id);
  return <Shown asked={asked}>{(audit) => <OfAudit audit={audit} />}</Shown>;
}

function OfAudit({ audit }: { audit: Audit }) {
  const found = audit.flaws.filter((flaw) => flaw.tasks > 0);
  return (
    <>
      <Head
        title={`Audit of ${audit.task_set || audit.name}`}
        crumbs={[["Sources", "/"]]}
        marks={<StateMark state={audit.state} />}
        facts={[
          ["Task set hash", audit.task_set_hash.slice(0, 12)],
          ["Path", audit.path],
          ...Object.entries(audit.seconds).map(([name, seconds]): [string, string] => [`Time: ${name}`, duration(seconds)]),
        ]}
      />
      {audit.audited < audit.size && (
        <Notice kind={audit.state === "running" ? "info" : "warn"}>
          {whole(audit.audited)} of {plural(audit.size, "task")} are audited. {audit.state === "running" ? "This page follows." : "Run the same command again to resume."}
        </Notice>
      )}
      <Reasons title={`${plural(Object.keys(audit.unsupported).length, "task")} unsupported here`} rows={audit.unsupported} />
      <Reasons title={`${plural(Object.keys(audit.infra).length, "task")} with infrastructure errors`} rows={audit.infra} />
      <Reasons title={`${plural(Object.keys(audit.problems).length, "task")} could not be read`} rows={audit.problems} />
      <div className="tiles">
        <Tile main label="Tasks without a flaw" value={whole(audit.kept)} note={`of ${whole(audit.audited)} audited, ${percent(audit.kept / Math.max(1, audit.audited), 0)}`} />
        <Tile label="No-model baseline" value={percent(audit.baseline)} note="mean over the tasks of the best policy without a model" />
        <Tile label="Kinds of flaws found" value={whole(found.length)} note={`${whole(found.filter((flaw) => flaw.breaks).length)} of them make a task unusable`} />
      </div>
      <div className="two">
        <Section title="Flaws" aside="tasks">
          <div className="card">
            {found.length ? (
              <Bars
                colour="var(--c1)"
                rows={[...found]
                  .sort((a, b) => b.tasks - a.tasks)
                  .map((flaw) => ({
                    key: flaw.name,
                    share: flaw.tasks / Math.max(1, audit.audited),
                    text: whole(flaw.tasks),
                    name: (
                      <>
                        <b>{flaw.name}</b> {flaw.breaks && <Mark kind="failed">breaks the task</Mark>}
                        <div className="soft">{flaw.about}</div>
                      </>
                    ),
                  }))}
              />
            ) : (
              <p className="soft">No flaw was found.</p>
            )}
          </div>
        </Section>
        <Listing
          title="What policies without a model earn"
          cols={[
            { name: "policy", grow: true, cell: (row) => row.policy },
            { name: "mean", num: true, cell: (row) => percent(row.mean) },
            { name: "max", num: true, cell: (row) => percent(row.max) },
            { name: "above 0", num: true, cell: (row) => whole(row.above_0) },
            { name: "above half", num: true, cell: (row) => whole(row.above_half) },
            { name: "crashed", num: true, cell: (row) => whole(row.crashed) },
          ]}
          rows={audit.policies}
        />
      </div>
      <Tasks audit={audit} flaws={found.map((flaw) => flaw.name)} />
    </>
  );
}

function Tasks({ audit, flaws }: { audit: Audit; flaws: string[] }) {
  const [query, change] = useQuery();
  const field = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => field.current?.focus() });
  const keep = asQuery({ flaw: query.get("flaw"), q: query.get("q") });
  const list = usePaged<AuditTask>(`audits/${audit.id}/tasks${keep}`, audit.id);
  const cols = useMemo(
    (): VCol<AuditTask>[] => [
      {
        name: "task",
        width: "minmax(96px, 1.2fr)",
        phone: true,
        cell: (row) => (
          <span className="open" tabIndex={-1} title={row.task}>
            {row.task}
          </span>
        ),
      },
      {
        name: "result",
        width: "108px",
        phone: true,
        cell: (row) =>
          row.broken ? (
            <Mark kind="failed" icon="cross">
              broken
            </Mark>
          ) : Object.keys(row.flaws).length ? (
            <Mark kind="warn" icon="warn">
              flaws
            </Mark>
          ) : (
            <Mark kind="kept" icon="check">
              kept
            </Mark>
          ),
      },
      { name: "baseline", width: "72px", num: true, cell: (row) => percent(row.baseline) },
      { name: "solution", width: "100px", cell: (row) => row.solution ?? "none" },
      {
        name: "what was found",
        width: "minmax(160px, 2.5fr)",
        cell: (row) => {
          const all = Object.entries(row.flaws);
          const text = all.map(([name, about]) => `${name}: ${about}`).join("; ");
          return <span title={text}>{text || <span className="soft">nothing</span>}</span>;
        },
      },
    ],
    [],
  );
  return (
    <Section title="Tasks" aside={<Found list={list} one="task" />}>
      <div className="filters">
        <FilterField field={field} label="Filter by task" placeholder="Task" value={query.get("q") ?? ""} change={(q) => change({ q })} />
        <Select label="Flaw" value={query.get("flaw")} onChange={(flaw) => change({ flaw })} options={flaws.map((name) => [name, name])} />
      </div>
      <VirtualTable label="Tasks" list={list} cols={cols} sort="" onSort={() => undefined} empty={<Blank small title="No task matches" />} />
    </Section>
  );
}

export function AttackPage({ params }: { params: { id: string } }) {
  const asked = useAnswer<Attack>(`attacks/${params.id}`, params.id);
  return <Shown asked={asked}>{(attack) => <OfAttack attack={attack} />}</Shown>;
}

const CLASSES: Record<string, string> = { "reads files": "reads files only", subprocess: "runs the agent's code in a subprocess", in_process: "runs the agent's code in its own process" };

function OfAttack({ attack }: { attack: Attack }) {
  const ours = attack.rates.filter((rate) => rate.grader === "ClawGym");
  const bad = ours.filter((rate) => rate.earned > 0 && !rate.allowed);
  return (
    <>
      <Head
        title={`Attacks on ${attack.task_set || attack.name}`}
        crumbs={[["Sources", "/"]]}
        marks={<StateMark state={attack.state} />}
        facts={[
          ["Task set hash", attack.task_set_hash.slice(0, 12)],
          ["Tasks attacked", `${whole(attack.attacked)} of ${whole(attack.size)}`],
          ["Exploits tried", whole(attack.exploits.length)],
          ["Path", attack.path],
        ]}
      />
      {attack.attacked < attack.size && attack.state !== "complete" && (
        <Notice kind={attack.state === "running" ? "info" : "warn"}>
          {whole(attack.attacked)} of {plural(attack.size, "task")} are attacked. {attack.state === "running" ? "This page follows." : "Run the same command again to resume."}
        </Notice>
      )}
      {bad.length > 0 ? (
        <Notice kind="error">
          <b>{plural(bad.length, "exploit")} earned reward</b> where no reward is expected: {bad.map((rate) => rate.exploit).join(", ")}.
        </Notice>
      ) : (
        <Notice>
          <b>No exploit earned reward</b> where the verifier does not run the agent's code.
        </Notice>
      )}
      <Reasons title={`${plural(Object.keys(attack.infra).length, "task")} with infrastructure errors`} rows={attack.infra} />
      <Section title="What the exploits earned" aside="share of the attacked tasks">
        {attack.rates.length === 0 ? (
          <Blank small title="Nothing was attacked yet" />
        ) : (
          <Table<AttackRate>
            card
            most={100}
            label="Rates of the attacks"
            cols={[
              { name: "exploit", cell: (rate) => <code>{rate.exploit}</code> },
              { name: "grader", cell: (rate) => rate.grader },
              { name: "verifier", grow: true, cell: (rate) => <span className="soft">{CLASSES[rate.task_class] ?? rate.task_class}</span> },
              { name: "tasks", num: true, cell: (rate) => whole(rate.tasks) },
              { name: "earned", num: true, cell: (rate) => whole(rate.earned) },
              {
                name: "rate",
                num: true,
                cell: (rate) => (
                  <Mark kind={rate.earned === 0 ? "kept" : rate.allowed ? "warn" : "failed"} icon={rate.earned === 0 ? "check" : "warn"}>
                    {percent(rate.rate)}
                  </Mark>
                ),
              },
              { name: "full score", num: true, cell: (rate) => whole(rate.full) },
              { name: "mean gain", num: true, cell: (rate) => number(rate.gain) },
              { name: "", cell: (rate) => (rate.allowed ? <span className="soft">expected: the verifier runs the agent's code</span> : "") },
            ]}
            rows={attack.rates}
          />
        )}
      </Section>
      {attack.rates
        .filter((rate) => rate.earned_on.length)
        .map((rate, at) => (
          <Reasons key={at} title={`${rate.exploit} (${rate.grader}) earned on ${plural(rate.earned_on.length, "task")}`} rows={rate.earned_on} />
        ))}
      <Listing
        title="What each exploit tries"
        cols={[
          { name: "exploit", cell: (exploit) => <code>{exploit.name}</code> },
          { name: "tries", grow: true, cell: (exploit) => exploit.tries },
        ]}
        rows={attack.exploits}
      />
    </>
  );
}
