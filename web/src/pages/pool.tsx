export function PoolPage() { return null; }
