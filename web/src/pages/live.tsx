/** The sandboxes that run now, by run. */
import { Link } from "wouter";
import type { Live, LiveSandbox, Sources } from "../api";
import { useAnswer } from "../data";
import { plural, whole } from "../format";
import { Blank, Head, Mark, Section, Shot, Shown, shorten } from "../ui";
import { placeOf } from "./sources";

export function LivePage() {
  const asked = useAnswer<Live>("live", "live");
  const sources = useAnswer<Sources>("sources");
  return (
    <>
      <Head title="Live" crumbs={[["Sources", "/"]]} />
      <Shown asked={asked}>
        {(live) =>
          live.runs.length === 0 ? (
            <Blank icon="box" title="Nothing runs now">
              <p>Sandboxes of this user appear here while they run, whichever process started them.</p>
              <pre>clawgym eval terminal-basic --agent oracle</pre>
            </Blank>
          ) : (
            live.runs.map((run) => {
              const source = sources.data?.sources.find((each) => each.id === run.source);
              return (
                <Section key={`${run.pid} ${run.name}`} title={run.name} aside={<>{source && <Link href={placeOf(source)}>Open the run</Link>} {plural(run.sandboxes.length, "sandbox", "sandboxes")}{run.name !== `process ${run.pid}` && `, process ${run.pid}`}</>}>
                  <div className="live">
                    {run.sandboxes.slice(0, 120).map((sandbox) => (
                      <Sandbox key={sandbox.id} sandbox={sandbox} />
                    ))}
                  </div>
                  {run.sandboxes.length > 120 && <p className="soft">and {whole(run.sandboxes.length - 120)} more</p>}
                </Section>
              );
            })
          )
        }
      </Shown>
    </>
  );
}

function Sandbox({ sandbox }: { sandbox: LiveSandbox }) {
  return (
    <article className="card" aria-label={sandbox.task}>
      <div>
        <div style={{ display: "flex", gap: 8, justifyContent: "space-between" }}>
          <b style={{ minWidth: 0 }}>{sandbox.task}</b>
          <Mark kind="running">turn {whole(sandbox.turn)}</Mark>
        </div>
        <div className="soft">{sandbox.agent}</div>
      </div>
      <p className="clamp" title={sandbox.instruction}>
        {shorten(sandbox.instruction, 600, 6)}
      </p>
      {sandbox.picture && <Shot src={sandbox.picture} alt={`Screen of ${sandbox.task}`} />}
      {sandbox.action && (
        <div>
          <div className="soft" style={{ fontSize: 12 }}>
            Last action
          </div>
          <div className="block clamp">{shorten(sandbox.action, 600, 6)}</div>
        </div>
      )}
      {sandbox.text && sandbox.text !== sandbox.instruction && (
        <div>
          <div className="soft" style={{ fontSize: 12 }}>
            Result
          </div>
          <div className="block seen" tabIndex={0} role="group" aria-label={`Result of the last action of ${sandbox.task}`}>
            {sandbox.text.slice(-1200)}
          </div>
        </div>
      )}
      {!sandbox.action && !sandbox.text && !sandbox.picture && <p className="soft">It has just started.</p>}
    </article>
  );
}
