export function EpisodePage() { return null; }
export function PoolEpisodePage() { return null; }
