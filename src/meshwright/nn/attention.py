"""Temporary plain attention."""
import jax, jax.numpy as jnp
def _plain(q,k,v,sinks,*,positions,key_positions,documents=None,key_documents=None,scale,window=None,softcap=None):
    B,T,N,H=q.shape; K=k.shape[2]; G=N//K
    qq=q.reshape(B,T,K,G,H)
    s=jnp.einsum("btkgh,bskh->bkgts",qq,k,preferred_element_type=jnp.float32)*scale
    if softcap: s=softcap*jnp.tanh(s/softcap)
    vis=positions[:,:,None]>=key_positions[:,None,:]
    if window: vis&=(positions[:,:,None]-key_positions[:,None,:])<window
    if documents is not None: vis&=documents[:,:,None]==key_documents[:,None,:]
    s=jnp.where(vis[:,None,None],s,-1e30)
    m=s.max(-1)
    if sinks is not None: m=jnp.maximum(m,sinks.reshape(K,G)[None,:,:,None])
    m=jax.lax.stop_gradient(m)
    p=jnp.where(vis[:,None,None],jnp.exp(s-m[...,None]),0)
    l=p.sum(-1)
    if sinks is not None: l=l+jnp.exp(sinks.reshape(K,G)[None,:,:,None]-m)
    o=jnp.einsum("bkgts,bskh->btkgh",(p/l[...,None]).astype(v.dtype),v)
    lse=(m+jnp.log(l)).transpose(0,3,1,2).reshape(B,T,N)
    return o.reshape(B,T,N,v.shape[-1]),lse
def attention(q,k,v,*,sinks=None,in_order=True,**f):
    return _plain(q,k,v,sinks,**f)
def attention_backward(do,o,lse,q,k,v,*,sinks=None,in_order=True,**f):
    if sinks is None:
        return jax.vjp(lambda q,k,v:_plain(q,k,v,None,**f)[0],q,k,v)[1](do)
    return jax.vjp(lambda q,k,v,s:_plain(q,k,v,s,**f)[0],q,k,v,sinks)[1](do)
