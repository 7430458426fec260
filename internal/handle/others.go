package handle

import "context"

// A lock context can be used with several database handles of a program. This file tells which of
// them mean the same locks, or the same server.

// where says which lock table strategy uses, or that it uses none; "" where the server does
// not say which one it is.
func (l *Locks) where(strategy string) string {
	server := l.server.Load().Server
	switch {
	case server == "":
		return ""
	case !traitsOf(strategy).Table:
		return server + "\x00" + l.namespace + "\x00" + strategy
	}
	return server + "\x00" + l.namespace + "\x00" + l.table.String()
}

// Shares reports whether a key means the same lock on both handles.
func (k *Handle) Shares(other *Handle, strategy string) bool {
	if k == other {
		return true
	}
	a, b := k.locks.Load(), other.locks.Load()
	if a == nil || b == nil {
		return false
	}
	where := a.where(strategy)
	return where != "" && where == b.where(strategy)
}

// SameServer reports whether both handles lead to one server, or cluster. Before it
// says no it asks both: after a failover one may not have looked yet.
func (k *Handle) SameServer(ctx context.Context, other *Handle) (bool, error) {
	for asked := false; ; asked = true {
		here, err := k.Use(ctx, nil)
		if err != nil {
			return false, err
		}
		there, err := other.Use(ctx, nil)
		if err != nil {
			return false, err
		}
		server := here.server.Load().Server
		same := server != "" && server == there.server.Load().Server
		if same || asked {
			return same, nil
		}
		k.doubt.Store(true)
		other.doubt.Store(true)
	}
}
