/**
 * The JSX of these pages: React's, except that every text and every label has its hidden characters escaped.
 *
 * Texts of tasks, agents and verifiers are untrusted. All of them reach the document here, so none can be forgotten.
 */
import { Fragment, jsx as reactJsx, jsxs as reactJsxs } from "react/jsx-runtime";
import type { ElementType, Key, ReactElement } from "react";
import { visible } from "../visible";

export type { JSX } from "react";
export { Fragment };

const LABELS = ["title", "alt", "label", "placeholder", "description", "aria-label", "aria-valuetext"] as const;

type Props = Record<string, unknown>;

function clean(props: Props): Props {
  let shown = props;
  const set = (name: string, value: unknown) => {
    if (shown === props) shown = { ...props };
    shown[name] = value;
  };
  const children = props.children;
  if (typeof children === "string") set("children", visible(children));
  else if (Array.isArray(children) && children.some((child) => typeof child === "string"))
    set(
      "children",
      children.map((child: unknown) => (typeof child === "string" ? visible(child) : child)),
    );
  for (const name of LABELS) {
    const value = props[name];
    if (typeof value === "string") set(name, visible(value));
  }
  return shown;
}

export function jsx(type: ElementType, props: Props, key?: Key): ReactElement {
  return reactJsx(type, clean(props), key);
}

export function jsxs(type: ElementType, props: Props, key?: Key): ReactElement {
  return reactJsxs(type, clean(props), key);
}
